"""Draws the plots of docs/experiments.md from the committed results.

    python memory_test/benchmarks/experiment_plots.py && python memory_test/benchmarks/tables.py

Each picture says in its metadata, under ``Source``, from which numbers it was drawn.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks import measured
from memory_test.benchmarks.measured import OURS, Cell
from memory_test.common.comparison import Group, group_results

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "experiments"
# A line needs lengths; without them bars are left.
LINES = ("time", "memory", "memory_vs_time")
BARS = ("overhead", "deferred_vs_immediate", "phases", "memory_breakdown")
# One step in one backward pass, and one card: files beside those of series.
EARLIER = ("llama3-1b_h200x2_2026-11-28_one_pass_later", "llama3-1b_h200_2026-11-28_one_by_one")


@dataclass(frozen=True)
class Picture:
    """A plot of this page.

    Attributes:
        title: What it is drawn of.
        name: Of the file.
        numbers: What it is drawn from.
        figure: Draws it; nothing if the numbers do not suffice.
    """

    title: str
    name: str
    numbers: Any
    figure: Callable[[], Any]

    @property
    def source(self) -> str:
        """What stands for the numbers."""
        text = json.dumps(self.numbers, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def all_pictures() -> Iterator[Picture]:
    """Everything that is drawn."""
    yield from _of_groups("earlier", _earlier_results(), ("time", "overhead"))
    for name, bundle in measured.files().items():
        yield from _of_groups(name, bundle["results"], (*LINES, *BARS))
        for run in bundle["accuracy"]:
            title = f"one process against {run['ranks']}, {measured.short(run['device'])}"
            figure = partial(_accuracy, run)
            yield Picture(title, f"{name}_accuracy_{run['ranks']}.png", run, figure)


def _of_groups(
    name: str, results: list[dict[str, Any]], plots: tuple[str, ...]
) -> Iterator[Picture]:
    for group in group_results(results):
        for plot in plots:
            if plot not in LINES or len(group.lengths()) > 1:
                file = f"{name}_{group.slug}_{plot}.png"
                yield Picture(group.title, file, group.results, partial(_plot, plot, group))


def _plot(name: str, group: Group) -> Any:
    from memory_test.common.plots import PLOTS

    return PLOTS[name](group)


def _accuracy(run: dict[str, Any]) -> Any:
    from memory_test.common import accuracy

    return accuracy.draw(run["rows"], accuracy.Trace.from_json(run["alone"]), run["ranks"])


def shown() -> dict[str, list[str]]:
    """The pictures that there are, by title."""
    found: dict[str, list[str]] = {}
    for picture in all_pictures():
        if (FOLDER / picture.name).is_file():
            found.setdefault(picture.title, []).append(picture.name)
    return found


def _earlier_results() -> list[dict[str, Any]]:
    """Earlier cells of one sample a card, in the form of results."""
    cells = [c for c in measured.all_cells() if c.call in EARLIER and c.batch == 1]
    return [_as_result(c) for c in cells if c.package == OURS or not c.private]


def _as_result(cell: Cell) -> dict[str, Any]:
    return {
        "mode": cell.mode,
        "model": cell.model,
        "task": "lm",
        "seq_length": cell.tokens,
        "batch_size": cell.batch,
        "num_processes": cell.gpus,
        "num_gpus": cell.gpus,
        "deferred": cell.deferred,
        "device": cell.card,
        "date": "",
        "peak_memory_gb": cell.peak_gb,
        "median_time_ms": cell.ms,
        "min_time_ms": cell.ms,
        "max_time_ms": cell.ms,
    }


def main() -> int:
    """Draw everything; the exit status."""
    try:
        from memory_test.common.plots import save
    except ImportError as error:
        print(f"plots need matplotlib (pip install matplotlib): {error}", file=sys.stderr)
        return 2
    kept = set()
    for picture in all_pictures():
        figure = picture.figure()
        if figure is not None:
            save(figure, FOLDER / picture.name, picture.source)
            kept.add(picture.name)
    for path in FOLDER.glob("*.png"):
        if path.name not in kept:
            path.unlink()
    print(f"{len(kept)} pictures in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
