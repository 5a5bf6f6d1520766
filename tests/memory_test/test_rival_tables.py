"""Tables that set this package beside pip opacus and beside its targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memory_test.benchmarks import measured, rival_tables
from memory_test.common.schema import LAYOUT

OURS, PIP = measured.OURS, "pip opacus 1.6.0"


def row(mode: str, package: str, ms: float, gb: float = 1.0) -> dict[str, object]:
    """A measured step."""
    return {"mode": mode, "package": package, "deferred": False, "private": mode != "no_dp",
            "status": "ok", "ms": {"median": ms}, "peak_gb": gb}  # fmt: skip


def write(folder: Path, name: str, *rows: dict[str, object], world: int = 1) -> None:
    """A result file."""
    cell = {"model": "llama3-1b", "batch": 1, "tokens": 4096, "wrapping": "blocks" if world > 1 else "single",
            "lora_rank": 0, "checkpointing": False, "rows": rows}  # fmt: skip
    found = {"layout": LAYOUT, "device": "NVIDIA H200", "world": world, "cells": [cell]}
    text = json.dumps(found)
    (folder / f"{name}.json").write_text(text)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the committed results."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    return tmp_path


def test_a_mode_is_set_beside_what_pip_opacus_has_in_its_place(results: Path) -> None:
    write(results, "one", row("ghost_bk", OURS, 50.0, 3.0), row("ghost", PIP, 200.0, 4.0),
          row("hooks", PIP, 10.0))  # fmt: skip
    (match,) = rival_tables.matches()
    assert (match.mode, match.instead) == ("ghost_bk", "ghost")
    assert "| 50.0 | 200.0 | 0.25 | 3.0 | 4.0 | 0.75 | one |" in rival_tables.one_card()
    assert "ghost_bk" not in rival_tables.several_cards()


def test_other_calls_are_not_compared(results: Path) -> None:
    write(results, "one", row("ghost", OURS, 50.0))
    write(results, "two", row("ghost", PIP, 200.0))
    assert rival_tables.matches() == []


def test_what_misses_its_target_is_bold(results: Path) -> None:
    plain = row("no_dp", "non-private", 100.0)
    write(results, "first", plain, row("ghost_fsdp_bk", OURS, 130.0, 1.2), world=2)
    write(results, "second", plain, row("ghost_fsdp_bk", OURS, 110.0), world=2)
    text = rival_tables.targets()
    assert "| 1x4096 | 1.20 | **1.30**, 1.10 | 1.10 | **1.20** |" in text
    assert text.count("ghost_fsdp_bk") == 1  # cells that nobody measured are left out


def test_a_target_needs_the_non_private_step_of_its_call(results: Path) -> None:
    write(results, "first", row("ghost_fsdp_bk", OURS, 130.0), world=2)
    with pytest.raises(ValueError, match="no non-private step beside ghost_fsdp_bk"):
        rival_tables.targets()
