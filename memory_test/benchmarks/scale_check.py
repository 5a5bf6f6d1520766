"""Compares the cost model with everything that was measured.

    python memory_test/benchmarks/scale_check.py [--markdown table.md]

Reads all files of ``memory_test/results``, of this benchmark and of earlier ones. How fast a host
launches kernels differs by 30% between machines; it is taken from one cell of each file, the
non-private step with the fewest tokens, which therefore is no check of the time, unless the device
alone is predicted to take as long.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.results import is_bundle
from opacus.scale import MODES as MODELLED
from opacus.scale import SHAPES, Rates, Run, predict, rates_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
SERIES = "experiments"  # the folder in it
TOLERANCE = 0.15
# Cells by which rates.json was fitted: file, mode, batch, tokens.
SECOND = "2026-11-28_h200x2_one_pass_1b_second"
FITTED = {
    (SECOND, "no_dp", 2, 8192), (SECOND, "no_dp", 4, 4096), (SECOND, "no_dp", 16, 1024),
    (SECOND, "no_dp", 16, 512), (SECOND, "ghost_fsdp_bk", 16, 1024),
    (SECOND, "ghost_fsdp_bk", 2, 8192), (SECOND, "ghost_fsdp_bk", 1, 1024),
    ("2026-11-28_h200x2_ghost_fsdp_1b", "ghost_fsdp", 1, 1024),
    ("2026-11-28_h100x2_ghost_fsdp_1b", "ghost_fsdp", 1, 1024),
    ("2026-11-28_h100x2_ghost_fsdp_1b", "no_dp", 4, 4096),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One measured cell.

    Attributes:
        file: Name of the result file.
        card: ``"h100"`` or ``"h200"``.
        run: The same for the cost model.
        ms: Median time of a step.
        peak_gb: Peak memory in GiB.
        calibrates: Whether the speed of the host was taken from it.
    """

    file: str
    card: str
    run: Run
    ms: float
    peak_gb: float
    calibrates: bool = False

    @property
    def fitted(self) -> bool:
        """Whether rates were fitted to its time."""
        run = self.run
        key = (self.file, run.mode, run.batch, run.tokens)
        return self.calibrates or (key in FITTED and not run.deferred)


@dataclass(frozen=True)
class Compared:
    """A cell and its prediction: relative errors, positive where the prediction is too large.

    Attributes:
        measured: The cell.
        ms, peak_gb: What is predicted.
        host_bound: Whether the host is predicted to set the pace.
    """

    measured: Measured
    ms: float
    peak_gb: float
    host_bound: bool = False

    @property
    def time_error(self) -> float:
        """Of the time of a step."""
        return self.ms / self.measured.ms - 1

    @property
    def memory_error(self) -> float:
        """Of the peak memory."""
        return self.peak_gb / self.measured.peak_gb - 1


def compare_all(folder: Path = RESULTS) -> list[Compared]:
    """All measured cells that the model covers, file by file, series last."""
    paths = [*sorted(folder.glob("*.json")), *sorted((folder / SERIES).glob("*.json"))]
    return [one for path in paths for one in compare_file(path)]


def compare_file(path: Path) -> list[Compared]:
    """The cells of one file, with its host's speed taken from one of them."""
    cells = list(cells_of(path))
    plain = [c for c in cells if not c.run.private]
    if not plain:
        return []
    first = min(plain, key=_size)
    rates = rates_of(first.card)
    known = predict(first.run, rates).duration
    # A step that takes as long as its device needs says nothing about the host.
    tells = known.bound_by == "host" or known.step * 1e3 < (1 - TOLERANCE) * first.ms
    if tells:
        rates = replace(rates, host_seconds_of_block=_host_speed(first))
    compared = []
    for cell in cells:
        marked = replace(cell, calibrates=tells and cell is first)
        found = predict(cell.run, rates)
        time, peak = found.duration, found.memory.peak / 2**30
        compared.append(Compared(marked, time.step * 1e3, peak, time.bound_by == "host"))
    return compared


def _size(cell: Measured) -> tuple[bool, int, int, int]:
    run = cell.run
    return run.checkpointing, run.shape.parameters, run.tokens_here, run.tokens


def _host_speed(cell: Measured) -> float:
    """Seconds of a block with which the host would take as long as the step did."""
    rates: Rates = rates_of(cell.card)
    predicted = predict(cell.run, rates).duration.host * 1e3
    return rates.host_seconds_of_block * cell.ms / predicted


def cells_of(path: Path) -> Iterator[Measured]:
    """Cells of a file that the model covers: this package or non-private, FSDP2 or one card."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        return
    if is_bundle(found):
        yield from _of_series(path.stem, found)
    elif "cells" in found:
        yield from _of_steps(path.stem, found)
    elif "rows" in found:
        yield from _of_earlier(path.stem, found)


def _of_steps(name: str, found: dict[str, Any]) -> Iterator[Measured]:
    card = _card(found["device"])
    for cell in found["cells"]:
        plain = cell["wrapping"] != "leaves" and not cell["lora_rank"]
        for row in cell["rows"]:
            ours = row["package"] in ("this package", "torch") and row["status"] == "ok"
            if not (card and plain and ours) or cell["model"] not in SHAPES:
                continue
            run = _run(cell["model"], found["world"], cell, row["mode"], row["deferred"],
                       cell["checkpointing"])  # fmt: skip
            if run is not None:
                yield Measured(name, card, run, row["ms"]["median"], row["peak_gb"])


def _of_earlier(name: str, found: dict[str, Any]) -> Iterator[Measured]:
    for row in found["rows"]:
        card = _card(row.get("card") or found.get("card", ""))
        package = row.get("package", "")
        other = "pip opacus" in package or "stored shards" in package or row.get("lora")
        if other or "case" not in row or "ms" not in row or not card:
            continue
        mode = "no_dp" if row["case"] == "nondp" else row["case"]
        deferred = row.get("env", {}).get("OPACUS_USE_DEFERRED_NORM") == "1"
        cell = {"batch": row["batch"], "tokens": row["seq"]}
        run = _run(f"llama3-{row['model']}", row.get("world", 1), cell, mode, deferred, False)
        if run is not None:
            yield Measured(name, card, run, row["ms"], row["peak_gb"])


def _of_series(name: str, found: dict[str, Any]) -> Iterator[Measured]:
    for result in found["results"]:
        card, config = _card(result["device"]), result["config"]
        plain = not config["lora_rank"] and config["optimizer"] == "sgd"
        if not (card and plain) or result["model"] not in SHAPES:
            continue
        cell = {"batch": result["batch_size"], "tokens": result["seq_length"]}
        mode = "no_dp" if result["mode"] == "no_dp_single" else result["mode"]
        run = _run(result["model"], result["num_gpus"], cell, mode, bool(result["deferred"]),
                   config["checkpointing"])  # fmt: skip
        if run is not None:
            yield Measured(name, card, run, result["median_time_ms"], result["peak_memory_gb"])


def _run(
    model: str, world: int, cell: dict[str, Any], mode: str, deferred: bool, checkpointing: bool
) -> Run | None:
    if mode not in MODELLED or (world == 1 and mode != "no_dp"):
        return None
    return Run(SHAPES[model], world, cell["tokens"], cell["batch"], mode, checkpointing, deferred)


def _card(name: str) -> str:
    return next((card for card in ("h100", "h200") if card in name.lower()), "")


def misses(compared: Sequence[Compared]) -> list[Compared]:
    """Cells whose time or memory is predicted worse than the tolerance."""
    return [one for one in compared if max(abs(one.time_error), abs(one.memory_error)) > TOLERANCE]


def markdown(compared: Sequence[Compared]) -> str:
    """A table of all cells; misses in bold, cells that were fitted marked."""
    lines = [
        "| file | cards | cell | mode | pace | ms | predicted | error | GiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in compared:
        cell = one.measured
        run = cell.run
        time = _percent(one.time_error) + (" (fitted)" if cell.fitted else "")
        mode = run.mode + "+deferred" * run.deferred
        lines.append(
            f"| {cell.file} | {run.gpus} {cell.card} | {_cell(run)} | `{mode}` "
            f"| {'host' if one.host_bound else 'device'} | {cell.ms:.0f} | {one.ms:.0f} | {time} "
            f"| {cell.peak_gb:.1f} | {one.peak_gb:.1f} | {_percent(one.memory_error)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(run: Run) -> str:
    name = next(name for name, shape in SHAPES.items() if shape == run.shape)
    again = " checkpointing" * run.checkpointing
    return f"{name.removeprefix('llama3-')} {run.batch}x{run.tokens}{again}"


def _percent(error: float) -> str:
    text = f"{error * 100:+.0f}%"
    return f"**{text}**" if abs(error) > TOLERANCE else text


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and how many cells are within the tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args(argv)
    compared = compare_all(args.results)
    table = markdown(compared)
    if args.markdown is not None:
        args.markdown.write_text(table)
    print(table)
    for what, errors in [
        ("time, cells not fitted", [c.time_error for c in compared if not c.measured.fitted]),
        ("time, all cells", [c.time_error for c in compared]),
        ("memory", [c.memory_error for c in compared]),
    ]:
        within = sum(abs(error) <= TOLERANCE for error in errors)
        print(f"{what}: {within} of {len(errors)} within {TOLERANCE:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
