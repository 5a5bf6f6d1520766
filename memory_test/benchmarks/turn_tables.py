"""Modes of one cell beside each other, step by step: deferred norms, and the flash kernels.

``steps.py`` lets modes take turns, so that the n-th steps of two of them saw the same host. The
median of their ratios tells more than the ratio of medians where the host's times vary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from memory_test.benchmarks import step_results
from memory_test.benchmarks.ways import DEFERRED
from memory_test.common import schema
from memory_test.common.comparison import table

# What is divided by what.
PAIRS = (
    ("ghost_fsdp" + DEFERRED, "ghost_fsdp"),
    ("flash_fsdp" + DEFERRED, "flash_fsdp"),
    ("flash_fsdp", "ghost_fsdp"),
    ("flash_fsdp" + DEFERRED, "ghost_fsdp" + DEFERRED),
)


def step_ratios(cell: dict[str, Any], over: str, under: str) -> list[float]:
    """Time of the n-th step of ``over`` divided by that of ``under``; empty if not measured."""
    times = {
        step_results.label(row): row["ms"]["all"]
        for row in cell["rows"]
        if row["status"] == "ok" and "all" in row["ms"]
    }
    if over not in times or under not in times:
        return []
    return [a / b for a, b in zip(times[over], times[under], strict=True)]


def turns_table(folder: Path) -> str:
    """Each cell of each file of ``folder`` in which modes of ``PAIRS`` took turns."""
    head = ["file", "cell", "steps", *(f"`{a}` / `{b}`" for a, b in PAIRS)]
    rows = [row for path, found in schema.all_files(folder) for row in _rows(path.stem, found)]
    return table(head, rows) + "\n"


def _rows(name: str, found: dict[str, Any]) -> Iterator[list[str]]:
    for cell in found["cells"]:
        ratios = [step_ratios(cell, *pair) for pair in PAIRS]
        if any(ratios):
            count = max(map(len, ratios))
            yield [name, step_results.title(cell), str(count), *map(_shown, ratios)]


def _shown(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return ""
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return f"{median(ratios):.3f} ({low:.2f} to {high:.2f})"
