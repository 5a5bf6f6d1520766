"""The part ``cells`` of result files, which ``steps.py`` writes: its rows and its table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memory_test.benchmarks.cases import OTHER_TARGETS, TARGETS, Cell
from memory_test.benchmarks.step_timing import Taken
from memory_test.common.failures import UsageError
from memory_test.common.schema import check_file


def read(path: Path) -> dict[str, Any]:
    """A result file with cells.

    Raises:
        UsageError: It is none.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    wrong = check_file(found) or ([] if "cells" in found else ["has no cells"])
    if wrong:
        raise UsageError(f"{path}: {'; '.join(wrong[:3])}")
    return found


# Features that a row says with a word of its own.
SAID = ("deferred", "compiled")


def rows_of(
    taken: Sequence[Taken], package: str = "this package", tokens: float = 0.0
) -> list[dict[str, Any]]:
    """Rows of one cell.

    Args:
        taken: The first is the non-private step that ratios are to, unless it is private.
        package: What private ones were measured with.
        tokens: A rank's share of a physical batch, for its tokens a second.
    """
    plain = [one for one in taken if not one.way.private]
    base = plain[0] if plain and plain[0].times_ms else None
    like = {one.way: one for one in plain if one.times_ms}
    rows = [_row(one, base, package) for one in taken]
    for row, one in zip(rows, taken, strict=True):
        same = like.get(one.way.baseline)
        if row["status"] == "ok" and one.way.private and same is not None:
            row["like"] = {"mode": str(same.way), **_ratios_to(row, same)}
        if row["status"] == "ok" and tokens:
            seconds = row["ms"]["median"] / 1e3
            row["tokens_per_second"] = round(tokens * one.way.accumulate / seconds)
    return rows


def _row(one: Taken, base: Taken | None, package: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "mode": one.way.mode,
        "deferred": one.way.deferred,
        "compiled": one.way.compiled,
        "private": one.way.private,
        "package": package if one.way.private else "torch",
        "features": [name for name in one.way.features if name not in SAID],
        "status": one.status,
        "checks": [check.record() for check in one.checks],
    }
    if one.error:
        return {**row, "error": one.error}
    row |= {"ms": spread(one.times_ms), "peak_gb": round(one.peak_mb / 1024, 3), **one.held}
    if one.budget_gib is not None:
        row["budget_gib"] = one.budget_gib
    if base is not None:
        row |= _ratios_to(row, base)
    return row


def _ratios_to(row: dict[str, Any], base: Taken) -> dict[str, Any]:
    return ratios(row, spread(base.times_ms), round(base.peak_mb / 1024, 3))


def ratios(
    row: dict[str, Any], base_ms: dict[str, Any], base_gb: float, *, in_turns: bool = True
) -> dict[str, Any]:
    """Time and memory as multiples of the non-private step.

    Quartiles are of ratios of steps that were timed next to each other; of ratios to the
    median where they did not take turns.
    """
    times, middle = row["ms"]["all"], base_ms["median"]
    others = base_ms["all"] if in_turns else [middle] * len(times)
    paired = [one / other for one, other in zip(times, others, strict=True)]
    return {
        "ratio": round(row["ms"]["median"] / base_ms["median"], 4),
        "ratio_quartiles": [round(v, 4) for v in _quartiles(paired)],
        "memory_ratio": round(row["peak_gb"] / base_gb, 4),
    }


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, range and all of them, in milliseconds."""
    return {
        "median": round(statistics.median(times), 3),
        "quartiles": [round(v, 3) for v in _quartiles(times)],
        "min": round(min(times), 3),
        "max": round(max(times), 3),
        "all": [round(t, 3) for t in times],
    }


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def title(cell: dict[str, Any]) -> str:
    """``"llama3-1b 4x4096"``, with adapters and checkpointing if there are any."""
    extra = f" LoRA {cell['lora_rank']}" if cell["lora_rank"] else ""
    extra += f" {cell['wrapping']}" if cell["wrapping"] not in ("blocks", "single") else ""
    extra += " checkpointing" if cell["checkpointing"] else ""
    extra += " half" * cell.get("half", False)  # older files lack it
    extra += " adamw" * (cell.get("optimizer") == "adamw")
    return f"{cell['model']} {cell['batch']}x{cell['tokens']}{extra}"


def label(row: dict[str, Any]) -> str:
    """Mode, with the package if it is another one."""
    name = row["mode"] + "+deferred" * row["deferred"]
    name += "+compiled" * row.get("compiled", False)  # older files lack it
    name = "+".join([name, *row.get("features", ())])
    other = row["private"] and row["package"] != "this package"
    return f"{name} ({row['package']})" if other else name


def markdown(found: dict[str, Any]) -> str:
    """All rows as a Markdown table, below a line that says where they come from."""
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    lines = [
        f"{found['world']} x {found['device']}, {found['date'][:10]}; {versions}.",
        "",
        "Targets are in brackets; what misses one is bold.",
        "",
        "| cell | mode | ms a step (quartiles) | of non-private | like it | peak GiB | "
        "of non-private | like it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in found["cells"]:
        for row in cell["rows"]:
            aims = _targets(cell, row, found["world"])
            lines.append(f"| {title(cell)} | `{label(row)}` | {_cells(row, aims)} |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any], aims: tuple[float | None, float | None]) -> str:
    if row["status"] != "ok":
        return f"{row['status'].replace('_', ' ')} | | | | | "
    low, high = row["ms"]["quartiles"]
    times = f"{row['ms']['median']:.1f} ({low:.1f} to {high:.1f})"
    ratio, memory = _aimed(row, "ratio", aims[0]), _aimed(row, "memory_ratio", aims[1])
    like = row.get("like", {})
    time, space = _aimed(like, "ratio", None), _aimed(like, "memory_ratio", None)
    return f"{times} | {ratio} | {time} | {row['peak_gb']:.1f} | {memory} | {space}"


def _aimed(row: dict[str, Any], key: str, aim: float | None) -> str:
    if key not in row:
        return ""
    text = f"{row[key]:.2f}"
    if aim is None:
        return text
    return f"{text if row[key] <= aim else f'**{text}**'} ({aim:.2f})"


def _targets(
    cell: dict[str, Any], row: dict[str, Any], world: int
) -> tuple[float | None, float | None]:
    single_backward = row["mode"].endswith("_bk") and row["package"] == "this package"
    plain = cell["wrapping"] in ("blocks", "single") and not cell["lora_rank"]
    plain = plain and not cell["checkpointing"] and not row.get("features")
    if not (single_backward and plain):
        return None, None
    size = Cell(cell["batch"], cell["tokens"])
    if (cell["model"], world) == ("llama3-1b", 2) and size in TARGETS:
        return TARGETS[size]
    return OTHER_TARGETS.get((cell["model"], world, size), (None, None))
