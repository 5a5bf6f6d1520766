"""Tables of measured steps; ``tables.py`` writes them into documents, or prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from memory_test.benchmarks import measured, rival_tables
from memory_test.benchmarks.experiment_plots import HEADLINE, in_headline
from memory_test.benchmarks.measured import OURS, Pair
from memory_test.common.comparison import (
    Group,
    failures_table,
    group_results,
    ordered,
    pairs_table,
    phases_table,
    runs_table,
    table,
)
from memory_test.common.phases import PHASES

NOTHING = "Not run on GPUs yet.\n"


@dataclass(frozen=True)
class Expectation:
    """A speedup by deferred norms that was set as a target before anything was built."""

    size: str
    models: tuple[str, ...]
    tokens: int
    low: float
    high: float
    or_more: bool = False

    def covers(self, pair: Pair) -> bool:
        """Whether a pair is evidence for or against it."""
        length = pair.tokens >= self.tokens if self.or_more else pair.tokens == self.tokens
        return length and pair.model in self.models and not pair.adapters


# End of the names of files in which deferred norms had no memory limit.
BEFORE_BUDGET = "_two_pass"
SMALL, MIDDLE, LARGE = ("gpt2",), ("llama3-1b", "llama3-3b"), ("llama3-8b",)
EXPECTED = (
    Expectation("< 500M", SMALL, 2048, 1.2, 1.2),
    Expectation("< 500M", SMALL, 4096, 1.3, 1.3),
    Expectation("1B to 3B", MIDDLE, 4096, 1.5, 1.7),
    Expectation("1B to 3B", MIDDLE, 8192, 1.7, 2.0),
    Expectation("> 7B", LARGE, 4096, 1.8, 2.2, or_more=True),
)


def expectations_table() -> str:
    """Target and measured speedup by deferred norms."""
    pairs = measured.deferred_pairs()
    rows = []
    for one in EXPECTED:
        found = [pair.speedup for pair in pairs if one.covers(pair)]
        promised = f"{one.low}x" + (f" to {one.high}x" if one.high > one.low else "")
        tokens = f"{one.tokens}{' or more' if one.or_more else ''}"
        rows.append((one.size, tokens, promised, span(found), verdict(found, one.low)))
    since = [pair for pair in pairs if not pair.file.endswith(BEFORE_BUDGET)]
    for which, some in (("all pairs", pairs), ("pairs since there is a budget", since)):
        growth = [pair.growth for pair in some]
        held = _of(sum(g < 0.05 for g in growth), growth)
        rows.append((f"memory, {which}", "", "less than +5%", span(growth, "{:+.1%}"), held))
    return table(("parameters", "tokens", "expected", "measured", "verdict"), rows) + "\n"


def span(values: Sequence[float], style: str = "{:.2f}x") -> str:
    """Smallest and largest of some numbers."""
    if not values:
        return "not measured"
    low, high = style.format(min(values)), style.format(max(values))
    return low if low == high else f"{low} to {high}"


def verdict(found: Sequence[float], wanted: float) -> str:
    """How many values reach the target."""
    return _of(sum(value >= wanted for value in found), found)


def _of(count: int, found: Sequence[float]) -> str:
    if not found:
        return ""
    word = {0: "does not hold", len(found): "holds"}.get(count, "holds in part")
    return f"{word} ({count} of {len(found)})"


def deferred_table() -> str:
    """All pairs of immediate and deferred norms."""
    rows = [
        (f"`{p.mode}`", p.model, p.place, f"{p.immediate_ms:.1f}", f"{p.deferred_ms:.1f}",
         f"{p.speedup:.2f}x", f"{p.growth:+.1%}", p.file)
        for p in measured.deferred_pairs()
    ]  # fmt: skip
    header = ("mode", "model", "cell", "immediate ms", "deferred ms", "speedup", "memory", "file")
    return table(header, rows) + "\n" if rows else NOTHING


def modes_table() -> str:
    """How each mode compares with the non-private step, over all cells that have one."""
    found = _ratios(lambda cell: (cell.mode, cell.package))
    places = {mode: number for number, mode in enumerate(ordered({m for m, _ in found}))}
    rows = [
        (f"`{mode}`", package, *_summary(found[mode, package]))
        for mode, package in sorted(found, key=lambda key: (places[key[0]], key[1] != OURS))
        if "stored shards" not in package  # an option that is gone
    ]
    return table(("mode", "package", *_SUMMARY), rows) + "\n"


_SUMMARY = ("cells", "step time", "peak memory")


def headline() -> str:
    """The modes that the README names, beside those of pip opacus, over all cells."""
    found = _ratios(lambda cell: (cell.mode, cell.package))
    rows = [
        (place, f"`{mode}`", package, *_summary(found[mode, package]))
        for place, modes in HEADLINE
        for mode in modes
        for package in sorted({p for m, p in found if m == mode}, key=lambda p: p != OURS)
        if in_headline(package)
    ]
    return table(("on", "mode", "package", *_SUMMARY), rows) + "\n"


def _ratios(
    key: Callable[[measured.Cell], tuple[str, str]],
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Time and memory as multiples of the non-private step, of all cells that have one."""
    cells = measured.all_cells()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cell in cells:
        plain = measured.baseline(cell, cells)
        if cell.private and plain is not None and not cell.deferred:
            ratio = (cell.ms / plain.ms, cell.peak_gb / plain.peak_gb)
            found.setdefault(key(cell), []).append(ratio)
    return found


def _summary(ratios: list[tuple[float, float]]) -> tuple[Any, ...]:
    """Number of cells, then median and range of time and of memory."""
    times, memory = zip(*ratios, strict=True)
    return len(times), _middle(times), _middle(memory)


def _middle(values: Sequence[float]) -> str:
    return f"{median(values):.2f}× ({min(values):.2f}–{max(values):.2f})"


def findings() -> str:
    """Summary of all pairs."""
    pairs = measured.deferred_pairs()
    if not pairs:
        return NOTHING
    speed, growth = [p.speedup for p in pairs], [p.growth for p in pairs]
    return (
        f"Over {len(pairs)} pairs in {len({p.file for p in pairs})} files: speedup by deferred "
        f"norms {span(speed)}, median {median(speed):.2f}x; growth of peak memory "
        f"{span(growth, '{:+.1%}')}, median {median(growth):+.1%}. "
        f"{sum(s >= 1.2 for s in speed)} of {len(pairs)} reach 1.2x.\n"
    )


# --- series of experiments ---


def groups_of(bundle: dict[str, Any]) -> list[Group]:
    """Comparable results of a series."""
    return group_results(bundle["results"])


def runs() -> str:
    """All runs of all series."""
    parts = []
    for name, bundle in measured.files().items():
        if not bundle["results"] and not bundle["failures"]:
            continue
        parts += [f"### {name}", f"{bundle['what']}. {_versions(bundle)}"]
        for group in groups_of(bundle):
            parts += [f"**{group.title}**", runs_table(group)]
            if group.pairs():
                parts.append(pairs_table(group))
        if bundle["failures"]:
            parts += ["**Runs without a result**", failures_table(bundle["failures"])]
    return "\n\n".join(parts) + "\n" if parts else NOTHING


def _versions(bundle: dict[str, Any]) -> str:
    found = {f"{k} {v}" for r in bundle["results"] for k, v in r["versions"].items()}
    dates = sorted({r["date"][:10] for r in bundle["results"]})
    return f"{', '.join(sorted(found))}; {', '.join(dates)}."


def choices() -> str:
    """The modes that ``auto`` chose."""
    rows = [
        (
            r["model"],
            f"{r['batch_size']} x {r['seq_length']}",
            r["num_gpus"],
            f"`{r['stands_for']}`",
        )
        for bundle in measured.files().values()
        for r in bundle["results"]
        if r.get("stands_for")
    ]  # fmt: skip
    return table(("model", "cell", "GPUs", "`auto` chose"), rows) + "\n" if rows else NOTHING


def norm_phases() -> str:
    """Phases of whole steps of the two Llama shapes."""
    parts = []
    for name, bundle in measured.files().items():
        for group in groups_of(bundle):
            if group.results[0]["model"] in (*MIDDLE, *LARGE):
                parts += [f"{group.title} (`{name}`), ms:", phases_table(group)]
    return "\n\n".join(parts) + "\n" if parts else NOTHING


def norm_shares() -> str:
    """Part of a step that is spent on norms, where they wait for the end of the backward pass."""
    rows = []
    for name, bundle in measured.files().items():
        for r in bundle["results"]:
            whole = sum(r["phases_ms"].get(phase, 0.0) for phase in PHASES)
            norms = r["phases_ms"].get("parallel_norms", 0.0)
            if r["deferred"] and norms and r["model"] in (*MIDDLE, *LARGE):
                cell = f"{r['batch_size']} x {r['seq_length']}"
                rows.append((f"`{r['mode']}`", r["model"], cell, r["num_gpus"], f"{norms:.1f}",
                             f"{whole:.1f}", f"{norms / whole:.1%}", name))  # fmt: skip
    header = ("mode", "model", "cell", "GPUs", "norms ms", "step ms", "share", "file")
    return table(header, rows) + "\n" if rows else NOTHING


def norm_cost() -> str:
    """Local computation and reduction of the norms, from ``benchmark_norm_parallel.py``."""
    header = ("model", "cards", "layout", "backend", "tokens", "samples", "layers", "local ms",
              "reduction ms", "total ms", "reduction / total")  # fmt: skip
    rows = [
        (run["model"], f"{run['num_processes']} {measured.short(run['device'])}", row["layout"],
         row["backend"], row["seq_length"], row["samples"], row["layers"],
         f"{row['local_ms']:.3f}", f"{row['reduction_ms']:.3f}", f"{row['total_ms']:.3f}",
         f"{row['reduction_ms'] / row['total_ms']:.1%}")
        for bundle in measured.files().values()
        for run in bundle["norms"]
        for row in run["rows"]
    ]  # fmt: skip
    return table(header, rows) + "\n" if rows else NOTHING


def accuracy() -> str:
    """One process against several, from ``test_accuracy_comparison.py``."""
    rows = [
        (f"`{row['mode']}`", row["layout"], "deferred" if row["deferred"] else "immediate",
         f"{run['ranks']} {measured.short(run['device'])}", f"{row['norm_error']:.1e}",
         f"{row['loss_error']:.1e}", f"{row['parameter_error']:.1e}",
         "agrees" if row["holds"] else "**differs**")
        for bundle in measured.files().values()
        for run in bundle["accuracy"]
        for row in run["rows"]
    ]  # fmt: skip
    header = ("mode", "samples", "norms are", "ranks", "norms", "losses", "parameters", "verdict")
    return table(header, rows) + "\n" if rows else NOTHING


def profiles() -> str:
    """Kernels by kind, from ``torch_profile``."""
    found = [run for bundle in measured.files().values() for run in bundle["profiles"]]
    kinds = [k for k in (found[0]["kernels"]["kinds_ms"] if found else ())
             if any(run["kernels"]["kinds_ms"][k] >= 0.05 for run in found)]  # fmt: skip
    columns = [_profile(run, kinds) for run in found]
    heads = ["", *(f"`{run['trainer']}`" for run in found)]
    rows = [(name, *(column[name] for column in columns)) for name in (columns or [{}])[0]]
    return table(heads, rows) + "\n" if rows else NOTHING


def _profile(run: dict[str, Any], kinds: list[str]) -> dict[str, str]:
    """One column: the cell, the step, and milliseconds of each kind of kernel."""
    milliseconds = run["kernels"]["kinds_ms"]
    return {
        "cell": f"{run['batch_size']} x {run['seq_length']}, {measured.short(run['device'])}",
        "step ms": f"{run['median_time_ms']:.1f}",
        "peak GiB": f"{run['memory']['peak_mb'] / 1024:.1f}",
        "peak in": run["memory"]["peak_phase"].replace("_", " "),
        **{kind.replace("_", " "): f"{milliseconds[kind]:.1f}" for kind in kinds},
    }


def earlier() -> str:
    """Cells of the files before series, with their ratios to the non-private step."""
    series = {name for name, found in measured.files().items() if found["results"]}
    cells = [c for c in measured.all_cells() if c.call.split()[0] not in series]
    rows = []
    for cell in cells:
        plain = measured.baseline(cell, cells)
        if not cell.private or plain is None:
            continue
        rows.append((f"`{cell.mode}`{' deferred' if cell.deferred else ''}", cell.package,
                     cell.place, f"{cell.ms:.1f}", f"{cell.ms / plain.ms:.2f}x",
                     f"{cell.peak_gb:.1f}", f"{cell.peak_gb / plain.peak_gb:.2f}x",
                     cell.call))  # fmt: skip
    header = ("mode", "package", "cell", "ms", "time / non-private", "peak GiB",
              "memory / non-private", "file, call")  # fmt: skip
    return table(header, rows) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "expectations": expectations_table,
    "findings": findings,
    "modes": modes_table,
    "headline": headline,
    "deferred": deferred_table,
    "runs": runs,
    "choices": choices,
    "earlier": earlier,
    "profiles": profiles,
    "accuracy": accuracy,
    "norm-phases": norm_phases,
    "norm-shares": norm_shares,
    "norm-cost": norm_cost,
    **rival_tables.AGAINST_OPACUS,
}
