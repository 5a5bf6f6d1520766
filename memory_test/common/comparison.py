"""Results side by side: series by mode, ratios to the non-private run, deferred to immediate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memory_test.common.modes import HARNESS_MODES, takes_all_devices
from memory_test.common.phases import PHASES
from memory_test.common.results import latest

Result = dict[str, Any]
IDENTITY = ("model", "task", "batch_size", "mode", "seq_length", "deferred", "device", "num_gpus")


@dataclass(frozen=True)
class Group:
    """Results that may be compared: of one model, task, batch size and kind of device, and all with
    activation checkpointing or all without.

    Attributes:
        results: By mode in the order of :data:`HARNESS_MODES`, then by length.
        slug: For file names.
        title: For people.
    """

    results: list[Result]
    slug: str
    title: str

    def series(self) -> dict[str, list[Result]]:
        """Results of each mode by length: the immediate ones, or deferred if those are all."""
        found: dict[str, list[Result]] = {}
        for mode in ordered({r["mode"] for r in self.results}):
            rows = [r for r in self.results if r["mode"] == mode]
            immediate = [r for r in rows if not r["deferred"]]
            found[mode] = sorted(immediate or rows, key=lambda r: r["seq_length"])
        return found

    def lengths(self) -> list[int]:
        """All lengths, ascending."""
        return sorted({r["seq_length"] for r in self.results})

    def baseline(self, result: Result) -> Result | None:
        """The non-private run that a result is to be compared with: as many processes."""
        name = "no_dp" if result["num_processes"] > 1 else "no_dp_single"
        names = (name, "no_dp") if takes_all_devices(result["mode"]) else (name,)
        for wanted in names:
            for other in self.results:
                same_length = other["seq_length"] == result["seq_length"]
                same_size = other["num_processes"] == result["num_processes"]
                if other["mode"] == wanted and same_length and same_size:
                    return other
        return None

    def ratio(self, result: Result, key: str) -> float | None:
        """``result[key]`` as a multiple of the non-private run's."""
        other = self.baseline(result)
        return None if other is None or not other[key] else result[key] / other[key]

    def pairs(self) -> list[tuple[Result, Result]]:
        """Immediate and deferred runs that differ in nothing else."""
        found = []
        for result in self.results:
            if result["deferred"]:
                continue
            same = [r for r in self.results if r["deferred"] and _same_run(r, result)]
            found += [(result, same[0])] if same else []
        return found


def group_results(results: Iterable[Result]) -> list[Group]:
    """Comparable results, the latest of each kind."""
    by_key: dict[tuple[Any, ...], list[Result]] = {}
    for again, some in _by_checkpointing(results):
        for result in latest(some, IDENTITY):
            key = (result["model"], result["task"], result["batch_size"], result["device"], again)
            by_key.setdefault(key, []).append(result)
    groups = []
    for (model, task, batch, device, again), rows in sorted(by_key.items()):
        rows.sort(key=lambda r: (mode_order(r["mode"]), r["seq_length"], r["deferred"]))
        many = " and ".join(map(str, sorted({r["num_processes"] for r in rows})))
        unit = "process" if device.startswith("CPU") else "GPU"
        slug = f"{model.replace('/', '_')}_{task}_B{batch}_{_word(device)}"
        samples = f"{batch} sample{'s' if batch > 1 else ''} a {unit}"
        title = f"{model.split('/')[-1]}, {samples}, {many} × {device}"
        if again:
            slug, title = f"{slug}_checkpointing", f"{title}, checkpointing"
        groups.append(Group(rows, slug, title))
    return groups


def _by_checkpointing(results: Iterable[Result]) -> list[tuple[bool, list[Result]]]:
    """Results without activation checkpointing, and those with it."""
    found: dict[bool, list[Result]] = {False: [], True: []}
    for result in results:
        found[bool(result.get("config", {}).get("checkpointing"))].append(result)
    return list(found.items())


def ordered(modes: Iterable[str]) -> list[str]:
    """Modes in the order of tables and plots."""
    return sorted(modes, key=mode_order)


def mode_order(mode: str) -> tuple[int, str]:
    """Place of a mode in tables and plots; unknown ones last."""
    known = mode in HARNESS_MODES
    return (HARNESS_MODES.index(mode) if known else len(HARNESS_MODES), mode)


def _same_run(one: Result, other: Result) -> bool:
    return all(one[key] == other[key] for key in IDENTITY if key != "deferred")


def _word(text: str) -> str:
    words = [w for w in text.replace("(", " ").replace(")", " ").split() if w != "NVIDIA"]
    return words[0].lower() if words else "device"


# --- as Markdown ---


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "|".join("---" if i == 0 else "---:" for i in range(len(header))) + "|")
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def times(value: float | None) -> str:
    """A ratio as text."""
    return "–" if value is None else f"{value:.2f}×"


def runs_table(group: Group) -> str:
    """All runs of a group, with their ratios to the non-private run."""
    rows = []
    for r in group.results:
        tokens = r["seq_length"] * r["total_batch_size"] / r["median_time_ms"] * 1e3
        rows.append(
            (
                f"`{r['mode']}`" + (" deferred" if r["deferred"] else ""),
                r["seq_length"],
                r["num_processes"],
                f"{r['median_time_ms']:.1f}",
                f"{r['min_time_ms']:.1f} – {r['max_time_ms']:.1f}",
                times(group.ratio(r, "median_time_ms")),
                f"{r['peak_memory_gb']:.2f}",
                times(group.ratio(r, "peak_memory_gb")),
                f"{tokens:,.0f}",
            )
        )
    header = ("mode", "tokens", "processes", "median ms", "range ms", "time / no_dp", "peak GB",
              "memory / no_dp", "tokens a second")  # fmt: skip
    return table(header, rows)


def pairs_table(group: Group) -> str:
    """Deferred against immediate norms."""
    rows = []
    for immediate, deferred in group.pairs():
        speedup = immediate["median_time_ms"] / deferred["median_time_ms"]
        growth = deferred["peak_memory_gb"] / immediate["peak_memory_gb"] - 1
        rows.append(
            (
                f"`{immediate['mode']}`",
                immediate["seq_length"],
                f"{immediate['median_time_ms']:.1f}",
                f"{deferred['median_time_ms']:.1f}",
                times(speedup),
                f"{growth:+.1%}",
            )
        )
    header = ("mode", "tokens", "immediate ms", "deferred ms", "speedup", "memory")
    return table(header, rows)


def phases_table(group: Group) -> str:
    """Milliseconds of the phases of a step."""
    names = [p for p in (*PHASES, "reduction") if any(r["phases_ms"].get(p) for r in group.results)]
    rows = [
        (
            f"`{r['mode']}`" + (" deferred" if r["deferred"] else ""),
            r["seq_length"],
            *(f"{r['phases_ms'].get(name, 0.0):.1f}" for name in names),
        )
        for r in group.results
    ]
    return table(("mode", "tokens", *(name.replace("_", " ") for name in names)), rows)


def failures_table(failures: Iterable[Result]) -> str:
    """Runs that gave no result."""
    rows = [
        (f"`{f.get('mode')}`", f.get("model"), f.get("seq_length"), f.get("batch_size"),
         str(f.get("kind")).replace("_", " "), str(f.get("error")).replace("|", "/")[:120])
        for f in failures
    ]  # fmt: skip
    return table(("mode", "model", "tokens", "batch", "kind", "error"), rows)
