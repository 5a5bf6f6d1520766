"""Draws the two plots of the documents from the committed results.

    python memory_test/benchmarks/experiment_plots.py && python memory_test/benchmarks/tables.py

One shows time over memory as multiples of the non-private step, the other tokens a second with and
without privacy. Both show the cells of the README's table. Each picture holds a hash of its numbers
in its metadata, under ``Source``, which a test compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks import measured, rival_tables
from memory_test.benchmarks.measured import OURS, Cell

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
# Modes of the README, and what their cells have in common.
HEADLINE = (
    ("several GPUs, FSDP2", ("ghost_fsdp_bk", "ghost_fsdp")),
    ("one GPU", ("ghost_bk", "ghost", "hooks")),
)
MARKS = {"ghost_bk": "o", "ghost": "s", "hooks": "^"}
OTHERS_COLOUR = "#d6457a"
CLOSE, WIDE = (0.9, 1, 1.1, 1.2, 1.3), (1, 1.5, 2, 3, 5, 7)  # multiples on an axis


@dataclass(frozen=True)
class Point:
    """One measured private step beside the non-private step of the same call.

    Attributes:
        place: A part of ``HEADLINE``.
        mode, package: As in :class:`Cell`.
        times: Step time as a multiple of the non-private step.
        memory: Peak memory likewise.
        tokens: Tokens a second on all GPUs, without and with privacy.
    """

    place: str
    mode: str
    package: str
    times: float
    memory: float
    tokens: tuple[float, float]

    @property
    def label(self) -> str:
        """Its name in the legend."""
        return self.mode if self.package == OURS else f"{self.mode}, {self.package}"


@dataclass(frozen=True)
class Picture:
    """A plot of the documents: its file, the axes' meaning, and what it shows of a point."""

    name: str
    title: str
    axes: tuple[str, str]
    values: Callable[[Point], tuple[float, float]]
    guides: tuple[float, ...] = ()

    @property
    def source(self) -> str:
        """A hash of everything that is drawn."""
        shown = [(p.place, p.label, *self.values(p)) for p in points()]
        text = json.dumps([self.title, self.axes, shown])
        return hashlib.sha256(text.encode()).hexdigest()


PICTURES = (
    Picture(
        "time_over_memory.png",
        "Private step as a multiple of the non-private step (lower left is better)",
        ("peak memory", "step time"),
        lambda point: (point.memory, point.times),
    ),
    Picture(
        "tokens_per_second.png",
        "Training speed with and without privacy, same work, same call (closer to 1× is better)",
        ("tokens a second, non-private", "tokens a second, private"),
        lambda point: point.tokens,
        guides=(1, 2, 4),
    ),
)


def in_headline(package: str) -> bool:
    """Whether the README's table counts cells of a package: ours or pip opacus, without options."""
    return package.startswith((OURS, rival_tables.RIVAL)) and "," not in package


def points() -> Iterator[Point]:
    """The cells of the README's table, in its order."""
    cells = measured.all_cells()
    for place, modes in HEADLINE:
        for mode in modes:
            found = [c for c in cells if c.mode == mode and in_headline(c.package)]
            for cell in sorted(found, key=lambda c: c.package != OURS):
                plain = measured.baseline(cell, cells)
                if plain is not None and not cell.deferred:
                    yield _point(place, cell, plain)


def _point(place: str, cell: Cell, plain: Cell) -> Point:
    tokens = cell.gpus * cell.batch * cell.tokens * 1000
    return Point(
        place=place,
        mode=cell.mode,
        package=cell.package,
        times=round(cell.ms / plain.ms, 4),
        memory=round(cell.peak_gb / plain.peak_gb, 4),
        tokens=(round(tokens / plain.ms), round(tokens / cell.ms)),
    )


def draw(picture: Picture) -> Any:
    """The figure, several GPUs at the left, one at the right."""
    from memory_test.common.plots import two_panels

    figure, panels = two_panels(picture.title)
    shown = list(points())
    for axes, (place, _) in zip(panels, HEADLINE, strict=True):
        axes.set_title(place)
        axes.set(xscale="log", yscale="log", xlabel=picture.axes[0])
        here = [p for p in shown if p.place == place]
        for label in dict.fromkeys(p.label for p in here):
            series = [p for p in here if p.label == label]
            places = [picture.values(p) for p in series]
            axes.scatter(*zip(*places, strict=True), label=label, **_look(series[0]))
        _readable(axes, picture.guides)
        axes.legend(fontsize=8)
    panels[0].set_ylabel(picture.axes[1])
    return figure


def _look(point: Point) -> dict[str, Any]:
    from memory_test.common.plots import colour_of

    ours = point.package == OURS
    colour = colour_of(point.mode) if ours else OTHERS_COLOUR
    mark = MARKS[point.mode.replace("_fsdp", "")]
    return {"color": colour, "marker": mark, "s": 30, "alpha": 0.75, "linewidths": 0}


def _readable(axes: Any, guides: tuple[float, ...]) -> None:
    """Ticks as multiples, or, for tokens, in thousands beside lines of equal slowdown."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    style = (lambda v, _: f"{v / 1000:g}k") if guides else (lambda v, _: f"{v:g}×")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        multiples = FixedLocator(CLOSE if high < 2 * low else WIDE)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if guides else multiples)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(style))
    if not guides:
        axes.axhline(1, color="#555555", linewidth=0.8)
        axes.axvline(1, color="#555555", linewidth=0.8)
    for slower in guides:
        low, high = axes.get_xlim()
        axes.plot(
            [low, high], [low / slower, high / slower], color="#999999", linewidth=0.8, zorder=0
        )
        axes.annotate(f"{slower}×", (high, high / slower), fontsize=8, color="#555555")
        axes.set_xlim(low, high)


def main() -> int:
    """Draw both; the exit status."""
    try:
        from memory_test.common.plots import save
    except ImportError as error:
        print(f"plots need matplotlib (pip install matplotlib): {error}", file=sys.stderr)
        return 2
    for picture in PICTURES:
        save(draw(picture), FOLDER / picture.name, picture.source)
        print(FOLDER / picture.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
