"""Ratios of steps that were timed next to each other."""

from __future__ import annotations

import json

import pytest

from memory_test.benchmarks import step_results, turn_tables
from memory_test.common import schema


def row_of(mode: str, times: list[float], deferred: bool = False, **changes):
    row = {"mode": mode, "deferred": deferred, "private": True, "package": "this package"}
    return {**row, "status": "ok", "ms": step_results.spread(times), **changes}


def cell_of(rows):
    size = {"batch": 1, "tokens": 8, "wrapping": "blocks", "lora_rank": 0}
    return {"model": "tiny", **size, "checkpointing": False, "rows": rows}


def test_steps_are_compared_with_their_neighbours():
    """A host that is twice as slow for half of the turns changes medians, not these ratios."""
    slow = [1.0, 1.0, 2.0, 2.0]
    rows = [row_of("ghost_fsdp", [100 * s for s in slow])]
    rows.append(row_of("ghost_fsdp", [90 * s for s in slow], deferred=True))
    ratios = turn_tables.step_ratios(cell_of(rows), "ghost_fsdp+deferred", "ghost_fsdp")
    assert ratios == pytest.approx([0.9] * 4)
    assert turn_tables.step_ratios(cell_of(rows), "flash_fsdp", "ghost_fsdp") == []


def test_another_package_is_not_taken_for_this_one():
    rows = [row_of("ghost_fsdp", [1.0, 1.0], package="pip opacus 1.6.0")]
    rows.append(row_of("flash_fsdp", [2.0, 2.0]))
    assert turn_tables.step_ratios(cell_of(rows), "flash_fsdp", "ghost_fsdp") == []


def test_table_of_a_folder(tmp_path):
    rows = [row_of("ghost_fsdp", [10.0, 20.0]), row_of("flash_fsdp", [9.0, 18.0])]
    rows.append({"mode": "flash_fsdp", "deferred": True, "status": "out_of_memory"})
    files = {"a": {"layout": schema.LAYOUT, "cells": [cell_of(rows), cell_of(rows[:1])]}}
    files |= {"b": {"layout": "another"}, "c": [1]}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    lines = turn_tables.turns_table(tmp_path).splitlines()
    assert len(lines) == 3
    assert lines[2] == "| a | tiny 1x8 | 2 |  |  | 0.900 (0.90 to 0.90) |  |"
