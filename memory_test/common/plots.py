"""Plots of results. Each function draws one figure of a group, or gives ``None`` if it cannot."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from memory_test.common.comparison import Group, Result
from memory_test.common.phases import PHASES
from memory_test.common.results import write_bytes

STYLE = {
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
# A family of modes has a hue; with book-keeping it is darker.
COLOURS = {
    "no_dp": "#555555",
    "no_dp_single": "#555555",
    "hooks": "#8c6bb1",
    "ghost": "#4292c6",
    "ghost_bk": "#08458b",
    "flash": "#f4a340",
    "flash_bk": "#c2410c",
    "auto": "#2a9d6f",
}
PHASE_COLOURS = dict(
    zip(
        PHASES,
        ("#9aa5b1", "#4292c6", "#08458b", "#8c6bb1", "#f4a340", "#c2410c", "#2a9d6f", "#c9b458",
         "#dddddd"),
        strict=True,
    )
)  # fmt: skip
KINDS = {
    "parameters": "#9aa5b1",
    "gradients": "#4292c6",
    "per_sample_gradients": "#8c6bb1",
    "optimizer": "#c9b458",
    "activations": "#f4a340",
    "norm_cache": "#c2410c",
}
MARKERS = "os^Dv<>P*Xhp"


def colour_of(mode: str) -> str:
    """The colour of a mode, the same in all figures."""
    return COLOURS.get(mode.replace("_fsdp", ""), "#d6457a")


def _figure(title: str, panels: int = 1, width: float = 8.5, height: float = 4.8) -> Any:
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, panels, figsize=(width, height), squeeze=False)
    figure.suptitle(
        title, x=0.01, y=1 - 0.1 / height, va="top", ha="left", fontsize=9, color="#555555"
    )
    figure.subplots_adjust(top=1 - 0.75 / height, bottom=0.55 / height, wspace=0.08)
    return figure, list(axes[0])


def _lines(group: Group, key: str, title: str, unit: str, spread: bool = False) -> Figure:
    figure, (axes,) = _figure(group.title)
    for index, (mode, rows) in enumerate(group.series().items()):
        single = rows[0]["num_processes"] == 1
        lengths = [r["seq_length"] for r in rows]
        axes.plot(
            lengths,
            [r[key] for r in rows],
            color=colour_of(mode),
            marker=MARKERS[index % len(MARKERS)],
            markersize=6,
            markerfacecolor="white" if single else colour_of(mode),
            linestyle="--" if single else "-",
            linewidth=1.8,
            label=mode + (" (deferred)" if rows[0]["deferred"] else ""),
        )
        if spread:
            low, high = ([r[f"{end}_time_ms"] for r in rows] for end in ("min", "max"))
            axes.fill_between(lengths, low, high, color=colour_of(mode), alpha=0.10, linewidth=0)
    _length_axis(axes, group.lengths())
    values = [r[key] for r in group.results]
    if max(values) > 12 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_ylabel(unit)
    handles = axes.get_legend_handles_labels()
    columns = "solid: all devices\ndashed: one device"
    axes.legend(*handles, loc="center left", bbox_to_anchor=(1.01, 0.5), title=columns,
                title_fontsize=8, alignment="left")  # fmt: skip
    return figure


def _length_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if len(lengths) == 1:
        axes.set_xlim(lengths[0] / 1.5, lengths[0] * 1.5)
    axes.set_xlabel("tokens a sample")


def plot_memory(group: Group) -> Figure | None:
    """Peak memory by length."""
    source = {r.get("memory_source") for r in group.results}
    unit = "GB (resident set of a process)" if source == {"resident set"} else "GB a GPU"
    return _lines(group, "peak_memory_gb", "Peak memory", unit)


def plot_time(group: Group) -> Figure | None:
    """Time of a step by length, with the range over the iterations."""
    return _lines(
        group, "median_time_ms", "Time of a training step", "ms (median; band: range)", spread=True
    )


def plot_memory_vs_time(group: Group) -> Figure | None:
    """One line a mode through its lengths; down and to the left is better."""
    figure, (axes,) = _figure(group.title)
    lengths = group.lengths()
    sizes = {length: 30 + 90 * i / max(1, len(lengths) - 1) for i, length in enumerate(lengths)}
    for mode, rows in group.series().items():
        single = rows[0]["num_processes"] == 1
        x, y = [r["median_time_ms"] for r in rows], [r["peak_memory_gb"] for r in rows]
        colour = colour_of(mode)
        axes.plot(x, y, color=colour, alpha=0.5, linewidth=1.2, linestyle="--" if single else "-")
        area = [sizes[r["seq_length"]] for r in rows]
        face = "white" if single else colour
        axes.scatter(x, y, s=area, facecolor=face, edgecolor=colour, zorder=3, label=mode)
    values = [r["median_time_ms"] for r in group.results]
    if max(values) > 5 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.4g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
    axes.set_title("Memory against time")
    axes.set_xlabel("ms a step (median)")
    axes.set_ylabel("peak GB")
    span = " to ".join(f"{n:,}" for n in sorted({lengths[0], lengths[-1]}))
    sizes_title = f"point size: {span} tokens\nhollow: one device"
    legend = axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), alignment="left")
    legend.set_title(sizes_title, prop={"size": 8})
    for handle in legend.legend_handles:
        handle.set_sizes([50])
    return figure


def plot_overhead(group: Group) -> Figure | None:
    """Time and memory as multiples of the non-private run."""
    modes = [m for m in group.series() if not m.startswith("no_dp")]
    cells = {
        key: {
            (r["mode"], r["seq_length"]): group.ratio(r, key)
            for m in modes
            for r in group.series()[m]
        }
        for key in ("median_time_ms", "peak_memory_gb")
    }
    if not any(v is not None for found in cells.values() for v in found.values()):
        return None
    bars = len(modes) * len(group.lengths())
    figure, panels = _figure(
        group.title, panels=2, width=10.5, height=1.6 + 0.21 * bars + 0.15 * len(modes)
    )
    titles = ("Time / no_dp", "Peak memory / no_dp")
    for axes, found, title in zip(panels, cells.values(), titles, strict=True):
        _bars(axes, modes, group.lengths(), found, lambda v: f"{v:.2f}×")
        axes.axvline(1.0, color="#333333", linewidth=1)
        axes.set_title(title)
    panels[1].set_yticklabels([])
    _length_legend(figure, group.lengths())
    return figure


def plot_deferred(group: Group) -> Figure | None:
    """Speedup and memory growth of deferred norms over immediate ones."""
    pairs = group.pairs()
    if not pairs:
        return None
    modes = list(dict.fromkeys(i["mode"] for i, _ in pairs))
    lengths = sorted({i["seq_length"] for i, _ in pairs})
    speed, memory = {}, {}
    for immediate, deferred in pairs:
        key = (immediate["mode"], immediate["seq_length"])
        speed[key] = immediate["median_time_ms"] / deferred["median_time_ms"]
        memory[key] = 100 * (deferred["peak_memory_gb"] / immediate["peak_memory_gb"] - 1)
    bars = len(modes) * len(lengths)
    figure, panels = _figure(
        group.title, panels=2, width=10.5, height=1.8 + 0.21 * bars + 0.15 * len(modes)
    )
    _bars(panels[0], modes, lengths, speed, lambda v: f"{v:.2f}×", base=1.0)
    panels[0].axvline(1.0, color="#333333", linewidth=1)
    panels[0].set_title("Speedup by deferred norms")
    _bars(panels[1], modes, lengths, memory, lambda v: f"{v:+.1f}%")
    panels[1].axvline(0.0, color="#333333", linewidth=1)
    panels[1].set_title("Growth of peak memory, %")
    panels[1].set_yticklabels([])
    _length_legend(figure, lengths)
    return figure


def _shade(index: int, count: int) -> Any:
    return plt.get_cmap("Blues")(0.35 + 0.6 * (index / max(1, count - 1) if count > 1 else 0.6))


def _bars(
    axes: Axes,
    modes: list[str],
    lengths: list[int],
    values: dict[tuple[str, int], float | None],
    text: Callable[[float], str],
    base: float = 0.0,
) -> None:
    """Horizontal bars from ``base``: a row a mode, in it a bar a length."""
    thick = 0.82 / len(lengths)
    known = [v for v in values.values() if v is not None]
    low, high = min([base, *known]), max([base, *known])
    for row, mode in enumerate(modes):
        for index, length in enumerate(lengths):
            value = values.get((mode, length))
            place = row + (index - (len(lengths) - 1) / 2) * thick
            if value is None:
                continue
            colour = _shade(index, len(lengths))
            axes.barh(place, value - base, left=base, height=thick * 0.9, color=colour)
            left = value < base
            offset, side = (-4, "right") if left else (4, "left")
            axes.annotate(text(value), (value, place), xytext=(offset, 0), va="center", ha=side,
                          textcoords="offset points", fontsize=7.5, color="#333333")  # fmt: skip
    axes.set_yticks(range(len(modes)), modes)
    axes.grid(axis="y", visible=False)
    room = 0.2 * ((high - low) or 1.0)
    axes.set_xlim(low - (room if low < base else 0), high + room)
    axes.set_ylim(len(modes) - 0.45, -0.55)


def _length_legend(figure: Figure, lengths: list[int]) -> None:
    patches = [
        plt.Rectangle((0, 0), 1, 1, color=_shade(i, len(lengths))) for i in range(len(lengths))
    ]
    labels = [f"{length:,} tokens" for length in lengths]
    figure.legend(patches, labels, loc="upper right", ncols=len(lengths), fontsize=8,
                  bbox_to_anchor=(0.91, 1.0), borderaxespad=0.2)  # fmt: skip


def _stacked(
    group: Group, part: str, colours: dict[str, str], title: str, unit: str, scale: float
) -> Figure | None:
    """What the runs at the largest length that most modes have are made of."""
    rows = _widest(group)
    if not any(r[part] for r in rows):
        return None
    labels = [r["mode"] + (" deferred" if r["deferred"] else "") for r in rows]
    figure, (axes,) = _figure(group.title, width=9.5, height=1.9 + 0.34 * len(rows))
    left = [0.0] * len(rows)
    for name, colour in colours.items():
        values = [r[part].get(name, 0.0) * scale for r in rows]
        if any(values):
            axes.barh(
                labels, values, left=left, color=colour, height=0.68, label=name.replace("_", " ")
            )
            left = [a + b for a, b in zip(left, values, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f"{total:,.3g}", (total, row), xytext=(4, 0), va="center", fontsize=8,
                      textcoords="offset points", color="#333333")  # fmt: skip
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.09 * max(left))
    axes.set_title(f"{title}, {rows[0]['seq_length']:,} tokens")
    axes.set_xlabel(unit)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    return figure


def _widest(group: Group) -> list[Result]:
    """The results at one length: where most were measured, the largest such."""
    by_length = {n: [r for r in group.results if r["seq_length"] == n] for n in group.lengths()}
    return max(by_length.values(), key=lambda rows: (len(rows), rows[0]["seq_length"]))


def plot_phases(group: Group) -> Figure | None:
    """What a step spends its time on."""
    return _stacked(group, "phases_ms", PHASE_COLOURS, "Phases of a step", "ms (mean)", 1.0)


def plot_memory_breakdown(group: Group) -> Figure | None:
    """What is kept in memory; kinds peak at different times, so their sum is no peak."""
    large = max(sum(r["memory_mb"].values()) for r in _widest(group)) > 2048
    unit, scale = ("GB", 1 / 1024) if large else ("MB", 1.0)
    return _stacked(group, "memory_mb", KINDS, "What is kept in memory", f"{unit} a process", scale)


PLOTS: dict[str, Callable[[Group], Figure | None]] = {
    "time": plot_time,
    "memory": plot_memory,
    "memory_vs_time": plot_memory_vs_time,
    "overhead": plot_overhead,
    "deferred_vs_immediate": plot_deferred,
    "phases": plot_phases,
    "memory_breakdown": plot_memory_breakdown,
}


def save(figure: Figure, path: Path, source: str | None = None) -> None:
    """Write a figure as PNG.

    Args:
        figure: The figure; it is closed.
        path: The file.
        source: Kept in its metadata.
    """
    picture = io.BytesIO()
    metadata = {"Software": None, "Source": source} if source else None
    figure.savefig(picture, format="png", bbox_inches="tight", pad_inches=0.15, metadata=metadata)
    plt.close(figure)
    write_bytes(path, picture.getvalue())


def two_panels(title: str) -> tuple[Figure, list[Axes]]:
    """A figure with two plots side by side, in the style of the others."""
    figure, axes = _figure(title, panels=2, width=10, height=4.6)
    figure.subplots_adjust(wspace=0.22)
    return figure, axes
