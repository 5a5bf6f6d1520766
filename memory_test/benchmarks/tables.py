"""Writes the tables of DOCUMENTS from the committed results and the cost model.

    python memory_test/benchmarks/tables.py             # documents, and all cells as CSV
    python memory_test/benchmarks/tables.py runs steps  # print these tables

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is one of ``TABLES``.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks import (
    experiment_tables,
    measured,
    rival_tables,
    scale_check,
    step_results,
    turn_tables,
)
from memory_test.common import schema
from memory_test.common.results import write_text
from memory_test.scale import SHAPES, Run, predict, rates_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = schema.RESULTS
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "scaling.md",
    ROOT / "docs" / "experiments.md",
)
CELLS = RESULTS / "cells.csv"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Model, GPUs, samples of a rank: of 8192 tokens.
SCALES = (
    ("llama3-1b", 8, 1), ("llama3-1b", 64, 1), ("llama3-8b", 8, 1), ("llama3-8b", 64, 1),
    ("llama3-70b", 64, 1), ("llama3-70b", 256, 1), ("llama3-70b", 1024, 1),
    ("llama3-405b", 512, 1), ("llama3-405b", 1024, 1), ("llama3-405b", 4096, 1),
)  # fmt: skip
TOKENS = 8192


def steps_table() -> str:
    """All result files of ``steps.py``."""
    parts = []
    for path, found in schema.all_files(RESULTS):
        if found["cells"] and "unchecked" not in found:
            parts.append(f"`{path.name}`: {step_results.markdown(step_results.read(path))}")
    return "\n".join(parts) or "No result file of `steps.py` is committed yet.\n"


def check_table() -> str:
    """Measured against predicted, every cell."""
    return scale_check.markdown(scale_check.compare_all())


def summary_table() -> str:
    """How many cells are within the tolerance."""
    return scale_check.summary(scale_check.compare_all())


def misses_table() -> str:
    """Cells that are not within the tolerance."""
    return scale_check.markdown(scale_check.misses(scale_check.compare_all()))


def scale_table(card: str = "h100") -> str:
    """Each model on so many cards: one backward pass, two, and without privacy."""
    lines = [
        "| model | GPUs | non-private ms | one backward ms | GiB | two backward ms | GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, gpus, batch in SCALES:
        cells = [f"{model} | {gpus}"]
        plain = _predict(card, model, gpus, batch, "ghost_fsdp").plain_duration
        cells.append(f"{plain.step * 1e3:,.0f}")
        for mode in ("ghost_fsdp_bk", "ghost_fsdp"):
            found = _predict(card, model, gpus, batch, mode)
            row = found.record()
            memory = f"{row['peak_gb']:,.0f}"
            cells.append(f"{row['step_ms']:,.0f} ({row['time_ratio']:.2f}x)")
            cells.append(memory if found.fits else f"**{memory}**")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _predict(card: str, model: str, gpus: int, batch: int, mode: str):  # noqa: ANN202
    run = Run(SHAPES[model], gpus, TOKENS, batch, mode, checkpointing=model != "llama3-1b")
    return predict(run, rates_of(card))


TABLES: dict[str, Callable[[], str]] = {
    "steps": steps_table,
    "turns": lambda: turn_tables.turns_table(RESULTS),
    "check": check_table,
    "summary": summary_table,
    "misses": misses_table,
    "scale": scale_table,
    **experiment_tables.TABLES,
    **rival_tables.AIMS,
}


def filled(text: str) -> str:
    """A document with its tables."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def cells_csv() -> str:
    """All measured cells, with time and memory as multiples of the non-private step."""
    cells = measured.all_cells()
    heads = [field.name for field in dataclasses.fields(measured.Cell)]
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([*heads, "time_ratio", "memory_ratio"])
    for cell in cells:
        plain = measured.baseline(cell, cells)
        ratios = (
            (f"{cell.ms / plain.ms:.3f}", f"{cell.peak_gb / plain.peak_gb:.3f}")
            if cell.private and plain is not None
            else ("", "")
        )
        lines.writerow([*dataclasses.astuple(cell), *ratios])
    return out.getvalue()


def main(names: Sequence[str]) -> int:
    """Write the documents, or print the tables that are named; the exit status."""
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        print(f"no tables {unknown}; there are {sorted(TABLES)}", file=sys.stderr)
        return 2
    for name in names:
        print(TABLES[name]())
    if not names:
        for path in DOCUMENTS:
            write_text(path, filled(path.read_text()))
        write_text(CELLS, cells_csv())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
