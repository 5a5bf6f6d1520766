"""Results of all runs as a page in Markdown, a picture, and scalars for TensorBoard."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from memory_test.common.comparison import table
from memory_test.common.results import write_bytes, write_text
from memory_test.torch_profile.kernel_kinds import KINDS
from memory_test.torch_profile.phases import PHASES

Result = dict[str, Any]
_ORDER = ("StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer")
_COLOURS = dict(zip(_ORDER, ("#333333", "#d6457a", "#4292c6"), strict=True))


def read_runs(folder: Path) -> tuple[list[Result], list[Result]]:
    """Results and failures of the runs in a folder, in the order of tables."""
    results: list[Result] = []
    failures: list[Result] = []
    for path in sorted(folder.glob("*/result*.json")):
        found = json.loads(path.read_text())
        (results if found.get("status") == "ok" else failures).append(found)

    def order(run: Result) -> tuple[Any, ...]:
        return run["batch_size"], run["seq_length"], _ORDER.index(run["trainer"])

    return sorted(results, key=order), sorted(failures, key=order)


def write_report(folder: Path) -> str:
    """Write report.md, and memory.png if there is matplotlib; returns the first table."""
    results, failures = read_runs(folder)
    overview = _overview(results) if results else "no run has a result"
    parts = ["# Profiles of a training step", _what_was_run(results), overview]
    if failures:
        parts += ["## Failed", *(_failure(failure) for failure in failures)]
    if results:
        parts += ["## Milliseconds a step by kind of kernel", _by(results, "kinds_ms", KINDS)]
        parts += ["## ... and by phase", _by(results, "phases_ms", (*PHASES, "other"))]
        parts += ["## What took longest", *(_longest(result) for result in results)]
    if results and _draw(folder / "memory.png", results):
        parts += ["## Memory over a step", "![memory](memory.png)"]
    write_text(folder / "report.md", "\n\n".join(parts) + "\n")
    return overview


def _what_was_run(results: list[Result]) -> str:
    kinds = sorted(
        {f"{r['device']}, {r['parameters']:,} parameters, {r['dtype']}" for r in results}
    )
    where = "kernels of the GPU" if results and not _on_cpu(results[0]) else "operators of the CPU"
    return "; ".join(kinds) + f". Times by kind are of {where}, under the profiler."


def _on_cpu(result: Result) -> bool:
    return str(result["device"]).startswith("CPU")


def _overview(results: list[Result]) -> str:
    base = {_cell(r): r for r in results if r["trainer"] == _ORDER[0]}
    rows = []
    for result in results:
        plain = base.get(_cell(result))
        ratio = result["median_time_ms"] / plain["median_time_ms"] if plain else None
        memory = result["memory"]
        rows.append(
            (
                result["trainer"],
                str(result["batch_size"]),
                str(result["seq_length"]),
                f"{result['median_time_ms']:.1f}",
                f"{ratio:.2f}" if ratio else "",
                f"{result['tokens_per_second']:,}",
                f"{memory['peak_mb']:.0f}",
                memory["peak_phase"],
            )
        )
    titles = ("trainer", "B", "T", "ms", "x standard", "tokens/s", "peak MB", "peak in")
    return table(titles, rows)


def _cell(result: Result) -> tuple[int, int]:
    return result["batch_size"], result["seq_length"]


def _label(result: Result) -> str:
    return f"{result['trainer']} B={result['batch_size']} T={result['seq_length']}"


def _failure(failure: Result) -> str:
    return f"- {_label(failure)}: {failure['kind']}, {failure['error']}"


def _by(results: list[Result], part: str, names: tuple[str, ...]) -> str:
    used = [n for n in names if any(r["kernels"][part].get(n, 0.0) >= 0.005 for r in results)]
    rows = [(_label(r), *(f"{r['kernels'][part].get(n, 0.0):.2f}" for n in used)) for r in results]
    return table(("run", *(name.replace("_", " ") for name in used)), rows)


def _longest(result: Result) -> str:
    rows = [
        (f"`{k['name'][:90]}`".replace("|", "/"), k["kind"], f"{k['calls']:g}", f"{k['ms']:.3f}")
        for k in result["kernels"]["longest"][:8]
    ]
    return f"### {_label(result)}\n\n" + table(("name", "kind", "calls", "ms"), rows)


def _draw(path: Path, results: list[Result]) -> bool:
    """The memory curves of the largest run of each trainer; False without matplotlib."""
    try:
        from memory_test.common.plots import two_panels
    except ImportError:
        return False
    largest = max(_cell(r) for r in results)
    shown = [r for r in results if _cell(r) == largest]
    figure, (left, right) = two_panels(f"batch {largest[0]}, {largest[1]:,} tokens")
    for result in shown:
        moments, values = zip(*(result["memory"]["curve"] or [(0, 0)]), strict=True)
        left.plot(moments, values, color=_COLOURS[result["trainer"]], label=result["trainer"])
    left.set(title="Memory over a step", xlabel="ms", ylabel="MB allocated")
    figure.legend(loc="upper right", ncols=len(shown), fontsize=8, bbox_to_anchor=(0.91, 1.0))
    figure.subplots_adjust(wspace=0.32)
    names = [kind for kind in KINDS if any(r["kernels"]["kinds_ms"][kind] > 0 for r in shown)]
    height = 0.8 / len(shown)
    for row, result in enumerate(shown):
        places = [i + (row - (len(shown) - 1) / 2) * height for i in range(len(names))]
        times = [result["kernels"]["kinds_ms"][kind] for kind in names]
        right.barh(places, times, height=height * 0.9, color=_COLOURS[result["trainer"]])
    right.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    right.invert_yaxis()
    right.set(title="Time by kind of kernel", xlabel="ms a step")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    write_bytes(path, picture.getvalue())
    return True


def write_scalars(folder: Path, result: Result) -> None:
    """What TensorBoard shows without its profiler plugin.

    Raises:
        ImportError: There is no package tensorboard.
    """
    from torch.utils.tensorboard import SummaryWriter

    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("step/median_ms", result["median_time_ms"], 0)
        writer.add_scalar("step/tokens_per_second", result["tokens_per_second"], 0)
        writer.add_scalar("memory/peak_mb", result["memory"]["peak_mb"], 0)
        for part in ("kinds_ms", "phases_ms"):
            for name, value in result["kernels"][part].items():
                writer.add_scalar(f"{part}/{name}", value, 0)
        for moment, value in result["memory"]["curve"]:  # the step is in microseconds
            writer.add_scalar("memory/allocated_mb", value, int(moment * 1e3))
