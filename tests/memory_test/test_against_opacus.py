"""The comparison with pip opacus: medians, ratios, and what both packages' processes are given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from memory_test.benchmarks import against_opacus

BOTH = ("this package", "pip opacus 1.6.0")


def result(ms: list[float], cpu: list[float]) -> dict[str, Any]:
    faults = [3] * len(ms)
    return {"ms": ms, "cpu_ms": cpu, "page_faults": faults, "peak_mb": None, "max_rss_mb": 1.0}


def test_ratios_are_of_medians_over_all_rounds() -> None:
    ours = [result([1.0, 2.0, 30.0], [1.0, 1.0, 1.0]), result([3.0, 4.0], [1.0, 5.0])]
    theirs = [result([6.0, 6.0, 6.0], [4.0, 4.0, 4.0])]
    row = against_opacus.summary("mlp", "ghost", dict(zip(BOTH, (ours, theirs), strict=True)))
    assert row["this package"]["median_ms"] == 3.0
    assert (row["time_ratio"], row["cpu_time_ratio"]) == (0.5, 0.25)
    assert row["this package"]["page_faults"] == 3


def test_a_package_that_fails_has_no_ratio() -> None:
    found = dict(zip(BOTH, ([result([1.0], [1.0])], [{"error": "boom"}]), strict=True))
    row = against_opacus.summary("mlp", "ghost", found)
    assert row["pip opacus 1.6.0"] == {"error": "boom"}
    assert "time_ratio" not in row


def test_packages_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def in_process(folder: Path, arguments: list[str]) -> dict[str, Any]:
        seen.append(folder)
        return result([1.0], [1.0])

    monkeypatch.setattr(against_opacus, "in_process", in_process)
    options = argparse.Namespace(
        reference=Path("elsewhere"), device="cpu", cases=["mlp"], iterations=1, rounds=2
    )
    rows = against_opacus.compare(options)
    assert [row["mode"] for row in rows] == list(against_opacus.MODES)
    assert seen == [against_opacus.ROOT, Path("elsewhere")] * 4
