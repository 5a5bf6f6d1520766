"""Steps on a card that is nearly full: what is held for the clipped sum has to fit into the rest.

    torchrun --nproc_per_node=1 memory_test/benchmarks/nearly_full.py --output result.json

First the non-private step and ours with all of the card. Then both with less and less of it
(``torch.cuda.set_per_process_memory_fraction``), as shares of the non-private step's peak, and
ours once more where it is told that it has all (``memory_budget``), so that memory runs out: a
batch that fails is left, and the next one is trained on. ``PYTORCH_CUDA_ALLOC_CONF`` counts, and
is noted.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from memory_test.benchmarks.cases import cells_of, suite_of
from memory_test.benchmarks.contenders import Contender, Recipe, build
from memory_test.benchmarks.trainer_steps import now
from memory_test.benchmarks.ways import EAGER, Amount, Way, ways_of
from memory_test.common.launch import joined
from memory_test.common.memory import release
from memory_test.common.results import write_json
from memory_test.common.schema import head, versions

CUDA = torch.cuda.is_available()
WHAT = (
    "whole steps with activation checkpointing and FSDP2 where a process may have a share of the "
    "non-private step's peak only; a batch that runs out of memory is left; ms: median of the last "
    "half of the steps"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama3-3b")
    add("--cell", default="6x4096", help="BATCHxTOKENS")
    add("--shares", type=float, nargs="*", default=[1.2, 1.03])
    add("--steps", type=int, default=8)
    add("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    with joined("cuda" if CUDA else "cpu", 600) as runtime:
        rows = Rows(args, runtime)
        rows.fill()


class Rows:
    """The rows of the file, each written as soon as it is known."""

    def __init__(self, args: argparse.Namespace, runtime: Any) -> None:
        self.args, self.runtime = args, runtime
        self.suite = suite_of("checkpoints-3b", model=args.model)
        self.cell = cells_of(args.cell)[0]
        self.found: list[dict[str, Any]] = []

    def fill(self) -> None:
        """All runs."""
        plain, ours = Way(EAGER), ways_of("ghost_fsdp_bk")[0]
        peak = self._run(plain, None)["peak_gb"] * 1e9
        self._run(ours, None)
        for share in self.args.shares:
            self._run(plain, share, peak)
            self._run(ours, share, peak)
        if CUDA and self.args.shares:
            self._run(ours, self.args.shares[0], peak, told=Amount(card_bytes() / 2**30))

    def _run(
        self, way: Way, share: float | None, peak: float = 0.0, told: Amount | None = None
    ) -> dict[str, Any]:
        may_have = 1.0 if share is None or not CUDA else min(1.0, share * peak / card_bytes())
        row: dict[str, Any] = {
            "model": self.args.model, "mode": way.mode, "batch": self.cell.batch,
            "tokens": self.cell.tokens, "share": share, "budget": told and str(told),
            "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "may_have_gb": may_have * card_bytes() / 1e9, "times_ms": [], "out_of_memory": [],
        }  # fmt: skip
        if CUDA:
            torch.cuda.set_per_process_memory_fraction(may_have)
            torch.cuda.reset_peak_memory_stats()
        recipe = Recipe(self.suite, self.cell.tokens, self.cell.batch, torch.bfloat16)
        contender = build(recipe, way, self.runtime)
        if told is not None:
            contender.model.memory_budget = told.bytes()
        self._steps(contender, row)
        last = row["times_ms"][-(self.args.steps + 1) // 2 :]
        row["ms"] = statistics.median(last) if last else None
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0
        row |= contender.held()
        del contender
        release(torch.device("cuda" if CUDA else "cpu"))
        self._note(row)
        return row

    def _steps(self, contender: Contender, row: dict[str, Any]) -> None:
        ids = contender.ids(self.cell.batch, self.cell.tokens)
        for step in range(self.args.steps):
            start = now()
            try:
                contender.step(ids)
            except torch.OutOfMemoryError:
                row["out_of_memory"].append(step)
                contender.park()
            else:
                row["times_ms"].append((now() - start) * 1e3)
            gc.collect()

    def _note(self, row: dict[str, Any]) -> None:
        self.found.append(row)
        print({k: v for k, v in row.items() if k != "times_ms"}, flush=True)
        card = torch.cuda.get_device_name() if CUDA else ""
        found = {**head(WHAT, card, versions()), "command": sys.argv, "nearly_full": self.found}
        write_json(self.args.output, found)


def card_bytes() -> int:
    """All memory of the card; of a CPU nothing is limited."""
    return torch.cuda.get_device_properties(0).total_memory if CUDA else 0


if __name__ == "__main__":
    main()
