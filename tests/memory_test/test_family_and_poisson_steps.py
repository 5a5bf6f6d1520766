"""Steps of families of models, and of trainers on Poisson batches: what the scripts write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from memory_test.benchmarks import family_steps, poisson_steps
from memory_test.common.schema import check_file


def written(path: Path, part: str) -> list[dict[str, Any]]:
    """The rows of a valid file."""
    found = json.loads(path.read_text())
    assert check_file(found) == []
    rows: list[dict[str, Any]] = found[part]
    return rows


def test_families_are_timed_beside_their_non_private_steps(tmp_path: Path) -> None:
    output = tmp_path / "families.json"
    family_steps.main(["--steps", "1", "--output", str(output)])
    rows = written(output, "families")
    assert [(row["model"], row["trained"], row["mode"]) for row in rows] == [
        (model, trained, mode)
        for model in ("moe", "llava")
        for trained in ("lora", "all")
        for mode in ("no_dp", "ghost_bk")
    ]
    for row in rows:
        low, high = row["ms"]["quartiles"]
        assert 0 < low <= row["ms"]["median"] <= high
        assert len(row["ms"]["all"]) == family_steps.ROUNDS and row["ratio"] > 0


def test_a_family_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(family_steps.FAMILIES, "moe", lambda: nn.Linear(2, 2))
    output = tmp_path / "failed.json"
    family_steps.main(
        ["--steps", "1", "--models", "moe", "--trained", "all", "--output", str(output)]
    )
    rows = written(output, "families")
    assert [row["ms"] for row in rows] == [None, None]
    assert all("TypeError" in row["error"] for row in rows)


def test_trainers_are_timed_from_the_first_step(tmp_path: Path) -> None:
    output = tmp_path / "poisson.json"
    poisson_steps.main(["--steps", "4", "--blocks", "eager", "--output", str(output)])
    plain, private = written(output, "trainers")
    assert (plain["mode"], private["mode"]) == ("no_dp", "ghost_bk")
    for row in (plain, private):
        assert len(row["times_ms"]) == 4 and len(row["ms"]["all"]) == 2
        assert row["ratio"] > 0 and not row["compiled"]


def test_padding_has_no_label() -> None:
    short, long = poisson_steps.texts(2, vocab=100)
    batch = poisson_steps.padded([short, long])
    assert batch["input_ids"].shape == batch["labels"].shape
    counts = [len(short["input_ids"]), len(long["input_ids"])]
    assert batch["attention_mask"].sum(1).tolist() == counts
    assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()
