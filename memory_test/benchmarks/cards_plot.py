"""Draws tokens a second a card over the number of cards, with and without privacy.

    python memory_test/benchmarks/cards_plot.py

From the newest call of each cell in ``results/*whole_steps.json``: one rank of FSDP2 a card. The
picture holds a hash of its numbers in its metadata, under ``Source``, which a test compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
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


def series() -> dict[str, Series]:
    """The newest pair of steps of each cell, by number of cards."""
    found: dict[str, Series] = {name: {} for name in CELLS}
    for path in sorted(RESULTS.glob("llama3_*whole_steps.json")):
        whole = json.loads(path.read_text())
        rows = sorted(whole["whole_steps"], key=lambda row: row["call"])
        for name, (model, batch, seq, lora, more) in CELLS.items():
            of_calls: dict[int, dict[str, float]] = {}
            for row in rows:
                if (row["model"], row["batch"], row["seq"]) != (model, batch, seq):
                    continue
                if row.get("lora", 0) != lora or bool(row.get("checkpointing")) != bool(lora):
                    continue
                if not row.get("offload"):
                    of_calls.setdefault(row["call"], {})[row["case"]] = row["ms"]
            for times in of_calls.values():
                if {f"nondp{more}", f"{MODE}{more}"} <= set(times):
                    plain, private = times[f"nondp{more}"], times[f"{MODE}{more}"]
                    tokens = batch * seq * 1000
                    found[name][whole["world"]] = (tokens / plain, tokens / private)
    return {name: dict(sorted(cards.items())) for name, cards in found.items() if cards}


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
