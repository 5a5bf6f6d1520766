"""Draws tokens a second a card over the number of cards, with and without privacy.

    python memory_test/benchmarks/cards_plot.py

From the newest call of each cell in ``results/llama3*.json``: one rank of FSDP2 a card. The picture
holds a hash of its numbers in its metadata, under ``Source``, which a test compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.schema import RESULTS

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "tokens_per_card.png"
MODE = "ghost_fsdp_bk"
# Model, batch, tokens, rank of adapters, what else: the cells measured on more than one card.
CELLS = {
    "1B, 4×4096": ("1b", 4, 4096, 0, ""),
    "1B, 4×4096, compiled": ("1b", 4, 4096, 0, "+c"),
    "1B, 16×512": ("1b", 16, 512, 0, ""),
    "8B, LoRA, checkpoints, 4×2048": ("8b", 4, 2048, 16, ""),
}
Series = dict[int, tuple[float, float]]  # cards -> tokens a second a card, plain and private
Key = tuple[str, int, int, int, str]


def series() -> dict[str, Series]:
    """The newest pair of steps of each cell, by number of cards."""
    names = {key: name for name, key in CELLS.items()}
    found: dict[str, Series] = {name: {} for name in CELLS}
    measured = [json.loads(path.read_text()) for path in RESULTS.glob("llama3*.json")]
    for file in sorted(measured, key=lambda file: str(file["date"])):
        for key, plain, private in [*_of_whole_steps(file), *_of_cells(file)]:
            if key in names:
                tokens = key[1] * key[2] * 1000
                found[names[key]][file["world"]] = (tokens / plain, tokens / private)
    return {name: dict(sorted(cards.items())) for name, cards in found.items() if cards}


def _of_whole_steps(file: dict[str, Any]) -> Iterator[tuple[Key, float, float]]:
    """Cells of one script's calls: milliseconds without privacy and with it."""
    of_calls: dict[tuple[int, Key], dict[str, float]] = {}
    what = file.get("what", "")
    rows = [] if "without FSDP2" in what else file.get("whole_steps", [])
    for row in sorted(rows, key=lambda row: row.get("call", 0)):
        lora = row.get("lora", 0)
        if row.get("offload") or bool(row.get("checkpointing")) != bool(lora):
            continue
        case, _, more = row["case"].partition("+")
        more = f"+{more}" if more else ""
        key = (row["model"], row["batch"], row["seq"], lora, more)
        of_calls.setdefault((row.get("call", 0), key), {})[case] = row["ms"]
    for (_, key), times in of_calls.items():
        if {"nondp", MODE} <= set(times):
            yield key, times["nondp"], times[MODE]


def _of_cells(file: dict[str, Any]) -> Iterator[tuple[Key, float, float]]:
    """The same of ``steps.py``."""
    for cell in file.get("cells", []):
        lora = cell["lora_rank"]
        if cell["wrapping"] != "blocks" or cell["checkpointing"] != bool(lora) or cell.get("half"):
            continue
        model = cell["model"].removeprefix("llama3-")
        times = {
            (row["mode"], row.get("compiled", False)): row["ms"]["median"]
            for row in cell["rows"]
            if row["status"] == "ok" and not (row["deferred"] or row.get("features"))
        }
        for more, plain, compiled in (("", "no_dp", False), ("+c", "no_dp_compiled", True)):
            if {(plain, False), (MODE, compiled)} <= set(times):
                key = (model, cell["batch"], cell["tokens"], lora, more)
                yield key, times[plain, False], times[MODE, compiled]


def source() -> str:
    """A hash of everything that is drawn."""
    shown = {n: [(c, *map(round, t)) for c, t in s.items()] for n, s in series().items()}
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw() -> Any:
    """The figure: a line a cell, dashed without privacy, solid with it."""
    from memory_test.common.plots import MARKERS, two_panels

    figure, panels = two_panels("FSDP2, one rank a card, H200 (dashed: without privacy)")
    for axes, size in zip(panels, ("1B", "8B"), strict=True):
        shown = {name: cards for name, cards in series().items() if name.startswith(size)}
        for index, (name, cards) in enumerate(shown.items()):
            plain, private = zip(*cards.values(), strict=True)
            (line,) = axes.plot(list(cards), private, marker=MARKERS[index], label=name[4:])
            look = {"linestyle": "--", "marker": MARKERS[index], "markerfacecolor": "white"}
            axes.plot(list(cards), plain, color=line.get_color(), **look)
        axes.set(
            title=size,
            xlabel="cards",
            xticks=[1, 2, 4],
            xlim=(0.5, 4.5),
            ylim=(0, 1.3 * max(axes.dataLim.intervaly)),
        )
        axes.yaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}k")
        axes.legend(fontsize=8)
    panels[0].set_ylabel("tokens a second a card")
    return figure


def main() -> int:
    """Draw it; the exit status."""
    try:
        from memory_test.common.plots import save
    except ImportError as error:
        print(f"plots need matplotlib (pip install matplotlib): {error}", file=sys.stderr)
        return 2
    save(draw(), PICTURE, source())
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
