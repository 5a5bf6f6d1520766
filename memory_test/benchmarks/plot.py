"""Draws what ``steps.py`` measured: time and memory as multiples of the non-private step.

python memory_test/benchmarks/plot.py result.json --png ratios.png --markdown table.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from memory_test.benchmarks.step_results import label, markdown, read, title
from memory_test.benchmarks.ways import EAGER
from memory_test.common.failures import UsageError, describe
from memory_test.common.results import prepare_folder, write_text

COLOURS = ("#555555", "#4292c6", "#c2410c", "#2a9d6f", "#8c6bb1", "#f4a340", "#c9b458", "#08458b")


def draw(found: dict[str, Any], png: Path) -> None:
    """Bars for each cell: time above, memory below; quartiles of the time ratio as whiskers."""
    cells = [cell for cell in found["cells"] if any("ratio" in row for row in cell["rows"])]
    if not cells:
        raise UsageError("no cell of the file has a ratio to the non-private step")
    figure, (time, memory) = plt.subplots(
        2, 1, figsize=(max(6.0, 1.7 * len(cells) + 2), 7), dpi=150, sharex=True
    )
    bars(time, cells, "ratio")
    bars(memory, cells, "memory_ratio")
    time.set_ylabel("time of a step / non-private")
    memory.set_ylabel("peak memory / non-private")
    time.legend(frameon=False, fontsize=8)
    where = f"{found['world']} x {found['device']}, torch {found['versions']['torch']}"
    time.set_title(f"{where}, {found['date'][:10]}", loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(png)
    plt.close(figure)


def bars(axes: Axes, cells: Sequence[dict[str, Any]], key: str) -> None:
    """One group of bars for each cell, one colour for each mode."""
    modes = dict.fromkeys(label(r) for c in cells for r in c["rows"] if label(r) != EAGER)
    width = 0.8 / max(1, len(modes))
    for number, mode in enumerate(modes):
        rows = [(x, r) for x, c in enumerate(cells) for r in c["rows"]
                if label(r) == mode and key in r]  # fmt: skip
        places = [x + (number - (len(modes) - 1) / 2) * width for x, _ in rows]
        heights = [row[key] for _, row in rows]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(places, heights, width * 0.92, color=colour, label=mode)
        for place, height, (_, row) in zip(places, heights, rows, strict=True):
            axes.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=6)
            if key == "ratio":
                axes.vlines(place, *row["ratio_quartiles"], color="black", linewidth=0.8)
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    names = [title(cell).replace(" ", "\n", 1) for cell in cells]
    axes.set_xticks(range(len(cells)), names, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and write; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("result", type=Path, help="JSON file of steps.py")
    parser.add_argument("--png", type=Path, help="default: beside the result")
    parser.add_argument("--markdown", type=Path, help="default: printed")
    args = parser.parse_args(argv)
    try:
        found = read(args.result)
        png = args.png or args.result.with_suffix(".png")
        prepare_folder(png)
        draw(found, png)
        if args.markdown is None:
            print(markdown(found))
        else:
            write_text(args.markdown, markdown(found))
    except UsageError as error:
        print(error, file=sys.stderr)
        return describe(error).exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
