"""Writes the tables of DOCUMENTS from the committed results and the cost model.

    python memory_test/benchmarks/tables.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is one of ``TABLES``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks import (
    experiment_tables,
    rival_tables,
    scale_check,
    step_results,
    turn_tables,
)
from memory_test.common.results import write_text
from opacus.scale import SHAPES, Run, predict, rates_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = scale_check.RESULTS
DOCUMENTS = (
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "scaling.md",
    ROOT / "docs" / "experiments.md",
    ROOT / "memory_test" / "flash_fsdp_tests" / "NORM_PARALLEL_COMPUTATION_ANALYSIS.md",
)
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
    for path, _ in step_results.all_in(RESULTS):
        parts.append(f"`{path.name}`: {step_results.markdown(step_results.read(path))}")
    return "\n".join(parts) or "No result file of `steps.py` is committed yet.\n"


def check_table() -> str:
    """Measured against predicted, every cell."""
    return scale_check.markdown(scale_check.compare_all())


def summary_table() -> str:
    """How many cells are within the tolerance, and which are not."""
    compared = scale_check.compare_all()
    missed = scale_check.markdown(scale_check.misses(compared))
    return f"{scale_check.summary(compared)}\nWhat is missed:\n\n{missed}"


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
    "scale": scale_table,
    **experiment_tables.TABLES,
    **rival_tables.AIMS,
}


def filled(text: str) -> str:
    """A document with its tables."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main() -> int:
    """Write the documents; the exit status."""
    for path in DOCUMENTS:
        write_text(path, filled(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
