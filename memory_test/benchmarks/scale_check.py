"""Compares the cost model with everything that was measured.

    python memory_test/benchmarks/scale_check.py [--markdown table.md]

Reads all files of ``memory_test/results``, of this benchmark and of earlier ones. How fast a host
launches kernels differs between machines, and on one machine from minute to minute. So where the
host sets the pace, a private step is predicted from the non-private step of the same cell and call
(or, if the device sets the pace of that, of the cell nearest to it), and a non-private step from
the nearest smaller one of its call. The smallest one has none: it is no check of the time.

Private steps whose pace the host sets check today's ratios only if they measured today's package.
All others are listed, and counted by themselves.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks.scale_cells import (
    EARLIER_RATIOS,
    Measured,
    cells_of,
)
from memory_test.common.schema import RESULTS, all_files
from memory_test.scale import SHAPES, Rates, Run, predict, rates_of

TOLERANCE = 0.15


@dataclass(frozen=True)
class Compared:
    """A cell and its prediction: relative errors, positive where the prediction is too large.

    Attributes:
        measured: The cell.
        ms, peak_gb: What is predicted.
        host_bound: Whether the host is predicted to set the pace, of an earlier package with what
            that took of the host's time.
        speed_of: The non-private cell whose time tells the speed of the host, if any.
    """

    measured: Measured
    ms: float
    peak_gb: float
    host_bound: bool = False
    speed_of: Measured | None = None

    @property
    def time_error(self) -> float:
        """Of the time of a step."""
        return self.ms / self.measured.ms - 1

    @property
    def memory_error(self) -> float:
        """Of the peak memory."""
        return self.peak_gb / self.measured.peak_gb - 1

    @property
    def fitted(self) -> bool:
        """Whether the prediction of the time was made from this very time."""
        return self.measured.fitted or (self.host_bound and self.speed_of is self.measured)

    @property
    def earlier_time(self) -> bool:
        """Whether the time is that of an earlier package, on a host that sets the pace."""
        return self.host_bound and self.measured.earlier_time


def compare_all(folder: Path = RESULTS) -> list[Compared]:
    """All measured cells that the model covers, file by file."""
    return [one for path, _ in all_files(folder) for one in compare_file(path)]


def compare_file(path: Path) -> list[Compared]:
    """The cells of one file; nothing if it has no non-private step."""
    cells = list(cells_of(path))
    compared = []
    for cell in cells:
        call = [other for other in cells if other.call == cell.call]
        if all(other.run.private for other in call):
            continue
        speed_of = _speed_of(cell, [other for other in call if _tells(other)])
        rates = rates_of(cell.card)
        if speed_of is not None:
            rates = replace(rates, host_seconds_of_block=_host_speed(speed_of))
        found = predict(cell.run, rates)
        time, peak = found.duration, found.memory.peak / 2**30
        then = replace(rates, **EARLIER_RATIOS) if cell.earlier_time else rates
        host_bound = predict(cell.run, then).duration.bound_by == "host"
        compared.append(Compared(cell, time.step * 1e3, peak, host_bound, speed_of))
    return compared


def _tells(cell: Measured) -> bool:
    """Whether a step shows the host's speed: it waited for the host, not for the device."""
    if cell.run.private:
        return False
    known = predict(cell.run, rates_of(cell.card)).duration
    device = sum(known.device.values()) * 1e3
    on_a_usual_host = known.bound_by == "host" and device < cell.ms
    return on_a_usual_host or device < (1 - TOLERANCE) * cell.ms


def _speed_of(cell: Measured, telling: Sequence[Measured]) -> Measured | None:
    """Which of ``telling`` to predict ``cell`` from."""
    if not cell.run.private:
        telling = [other for other in telling if _size(other) < _size(cell)]
        if not telling and _tells(cell):
            return cell
    return min(telling, key=lambda other: _distance(cell.run, other.run), default=None)


def _size(cell: Measured) -> tuple[bool, int, int, int]:
    run = cell.run
    return run.checkpointing, run.shape.parameters, run.tokens_here, run.tokens


def _distance(one: Run, other: Run) -> tuple[bool, bool, float, float]:
    return (
        one.shape != other.shape,
        one.checkpointing != other.checkpointing,
        abs(math.log(one.tokens_here / other.tokens_here)),
        abs(math.log(one.tokens / other.tokens)),
    )


def _host_speed(cell: Measured) -> float:
    """Seconds of a block with which the host would take as long as the step did."""
    rates: Rates = rates_of(cell.card)
    predicted = predict(cell.run, rates).duration.host * 1e3
    return rates.host_seconds_of_block * cell.ms / predicted


def time_misses(compared: Iterable[Compared]) -> list[Compared]:
    """Cells whose time is predicted worse than the tolerance."""
    return [one for one in compared if abs(one.time_error) > TOLERANCE]


def memory_misses(compared: Iterable[Compared]) -> list[Compared]:
    """Cells whose memory is predicted worse than the tolerance."""
    return [one for one in compared if abs(one.memory_error) > TOLERANCE]


def misses(compared: Iterable[Compared]) -> list[Compared]:
    """Cells whose time or memory is predicted worse than the tolerance."""
    return [one for one in compared if time_misses([one]) or memory_misses([one])]


def counts(compared: Sequence[Compared]) -> dict[str, tuple[int, int]]:
    """How many cells of each kind are within the tolerance, and of how many."""
    free = [c for c in compared if not c.fitted]
    host = [c for c in free if c.host_bound]
    today = [c for c in host if not c.earlier_time]
    by_time = {
        "time, the device sets the pace": [c for c in free if not c.host_bound],
        "time, the host sets the pace, private": [c for c in today if c.measured.run.private],
        "time, the host sets the pace, non-private": [
            c for c in today if not c.measured.run.private
        ],
        "time, the host sets the pace, earlier package (listed only)": [
            c for c in host if c.earlier_time
        ],
        "time, all of these": free,
        "time, fitted cells too": list(compared),
    }
    by_memory = {
        "memory": [c for c in compared if not c.measured.earlier_memory],
        "memory, earlier package (listed only)": [c for c in compared if c.measured.earlier_memory],
    }
    return {
        **{what: (len(of) - len(time_misses(of)), len(of)) for what, of in by_time.items()},
        **{what: (len(of) - len(memory_misses(of)), len(of)) for what, of in by_memory.items()},
    }


def scatter(compared: Iterable[Compared]) -> Iterator[tuple[str, float, float]]:
    """Of each call the shortest and the longest non-private step whose pace the host sets.

    The cells differ in their tokens, which cost the host nothing; milliseconds.
    """
    times: dict[tuple[object, ...], list[float]] = {}
    for one in compared:
        cell, run = one.measured, one.measured.run
        if _tells(cell):
            key = (cell.file, cell.call, run.gpus, run.shape, run.checkpointing)
            times.setdefault(key, []).append(cell.ms)
    for key, found in times.items():
        if len(found) > 1:
            yield str(key[0]), min(found), max(found)


def summary(compared: Sequence[Compared]) -> str:
    """A table of how many cells are within the tolerance, and where the host itself is not."""
    lines = [f"| cells | within {TOLERANCE:.0%} | of |", "|---|---:|---:|"]
    lines += [
        f"| {what} | {within} | {all_} |" for what, (within, all_) in counts(compared).items()
    ]
    noisy = [
        f"`{file}` ({low:.0f} to {high:.0f} ms)"
        for file, low, high in scatter(compared)
        if high > (1 + TOLERANCE) * low
    ]
    text = ", ".join(noisy) or "none"
    return (
        "\n".join(lines)
        + f"\n\nCalls whose host took times that differ by more than {TOLERANCE:.0%} "
        f"for the same non-private work: {text}.\n"
    )


def markdown(compared: Sequence[Compared]) -> str:
    """A table of all cells; misses in bold, cells that were fitted or are of old marked."""
    lines = [
        "| file | cards | cell | mode | pace | ms | predicted | error | GiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in compared:
        cell = one.measured
        run = cell.run
        time = _percent(one.time_error) + " (fitted)" * one.fitted
        time += " (earlier package)" * one.earlier_time
        memory = _percent(one.memory_error) + " (earlier package)" * cell.earlier_memory
        mode = run.mode + "+deferred" * run.deferred
        lines.append(
            f"| {cell.file} | {run.gpus} {cell.card} | {_cell(run)} | `{mode}` "
            f"| {'host' if one.host_bound else 'device'} | {cell.ms:.0f} | {one.ms:.0f} | {time} "
            f"| {cell.peak_gb:.1f} | {one.peak_gb:.1f} | {memory} |"
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
    print(summary(compared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
