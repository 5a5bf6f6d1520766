"""Tables that set this package beside pip opacus, and single backward passes beside their targets.

``tables.py`` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from memory_test.benchmarks import measured
from memory_test.benchmarks.cases import TARGETS
from memory_test.benchmarks.cases import Cell as Size
from memory_test.benchmarks.measured import OURS, Cell
from memory_test.common.comparison import table

RIVAL = "pip opacus"
# What pip opacus has instead of a mode; all others exist there under the same name.
INSTEAD = {"flash": "ghost", "ghost_bk": "ghost", "flash_bk": "ghost", "flash_fsdp": "ghost_fsdp",
           "ghost_fsdp_bk": "ghost_fsdp", "flash_fsdp_bk": "ghost_fsdp"}  # fmt: skip
# Calls with single backward passes under FSDP2, the oldest first; others follow by name.
CALLS = (
    "llama3-1b_h200x2_2026-11-28_one_pass_earlier",
    "llama3-1b_h200x2_2026-11-28_one_pass",
    "llama3-1b_h200x2_2026-11-28_one_pass_later",
    "llama3-1b_h200x2_2026-11-28_series",
    "llama3-1b_h200x2_2026-11-28_one_pass_last",
)


@dataclass(frozen=True)
class Match:
    """A step of this package and that of pip opacus for the same work in the same call.

    Attributes:
        mode: Of this package.
        instead: Of pip opacus.
        place: Batch, tokens and cards.
        gpus: Number of cards.
        ms, other_ms: Median time of a step.
        peak_gb, other_gb: Peak memory in GiB.
        call: Name of the file, and of the call in it.
    """

    mode: str
    instead: str
    place: str
    gpus: int
    ms: float
    other_ms: float
    peak_gb: float
    other_gb: float
    call: str


def matches() -> list[Match]:
    """All that can be compared with pip opacus, file by file."""
    cells = measured.all_cells()
    others = [cell for cell in cells if cell.package.startswith(RIVAL)]
    found = [
        Match(one.mode, other.mode, one.place, one.gpus, one.ms, other.ms, one.peak_gb,
              other.peak_gb, one.call)
        for one in cells
        for other in others
        if one.package == OURS and not one.deferred and one.is_like(other)
        and INSTEAD.get(one.mode, one.mode) == other.mode
    ]  # fmt: skip
    return found + list(_with_immediate_norms())


def _with_immediate_norms() -> Iterator[Match]:
    """Rows of ``test_deferred_norm.py --reference``."""
    for name, row in measured.rounds_in_turn():
        if reference := row.get("reference"):
            cards = f"{row['num_processes']} {measured.short(row['device'])}"
            yield Match(
                mode=row["mode"],
                instead=INSTEAD.get(row["mode"], row["mode"]),
                place=f"{row['batch_size']} x {row['seq_length']}, {cards}",
                gpus=row["num_processes"],
                ms=row["immediate_ms"],
                other_ms=median(reference["times_ms"]),
                peak_gb=row["immediate_peak_mb"] / 1024,
                other_gb=reference["peak_memory_mb"] / 1024,
                call=name,
            )


def one_card() -> str:
    """All matches on one card."""
    return _matches_table([match for match in matches() if match.gpus == 1])


def several_cards() -> str:
    """Ratios of all matches on several cards; ``cells.csv`` has their files."""
    rows = [
        (f"`{m.mode}`", f"`{m.instead}`", m.place, f"{m.ms:.0f}", f"{m.other_ms:.0f}",
         f"{m.ms / m.other_ms:.2f}", f"{m.peak_gb / m.other_gb:.2f}")
        for m in matches() if m.gpus > 1
    ]  # fmt: skip
    header = ("mode", "of pip opacus", "cell", "ms", "pip ms", "time / pip", "memory / pip")
    return table(header, rows) + "\n"


def _matches_table(found: list[Match]) -> str:
    rows = [
        (f"`{m.mode}`", f"`{m.instead}`", m.place, f"{m.ms:.1f}", f"{m.other_ms:.1f}",
         f"{m.ms / m.other_ms:.2f}", f"{m.peak_gb:.1f}", f"{m.other_gb:.1f}",
         f"{m.peak_gb / m.other_gb:.2f}", m.call)
        for m in found
    ]  # fmt: skip
    header = ("mode", "of pip opacus", "cell", "ms", "pip ms", "time / pip", "GiB", "pip GiB",
              "memory / pip", "file, call")  # fmt: skip
    return table(header, rows) + "\n"


def targets() -> str:
    """Single backward passes as multiples of the non-private step, call by call."""
    cells = [cell for cell in measured.all_cells() if _has_target(cell)]
    names = {_file(cell) for cell in cells if cell.private}
    files = [*(name for name in CALLS if name in names), *sorted(names - set(CALLS))]
    rows = []
    for mode in ("ghost_fsdp_bk", "flash_fsdp_bk"):
        for size, (time, memory) in TARGETS.items():
            own = [c for c in cells if c.mode == mode and (c.batch, c.tokens) == _pair(size)]
            ratios = {_file(c): _ratios(c, cells) for c in own}
            largest = max((found[1] for found in ratios.values()), default=None)
            if largest is not None:
                measured_times = ", ".join(_aimed(ratios[f][0], time) for f in files if f in ratios)
                rows.append((f"`{mode}`", str(size), f"{time:.2f}", measured_times,
                             f"{memory:.2f}", _aimed(largest, memory)))  # fmt: skip
    header = ("mode", "cell", "target time", "time, earliest call first",
              "target memory", "memory, largest")  # fmt: skip
    return table(header, rows) + "\n"


def _has_target(cell: Cell) -> bool:
    size = (cell.batch, cell.tokens) in {_pair(one) for one in TARGETS}
    usual = not {"checkpointing", "leaves"} & set(cell.call.split())
    known = cell.model == "llama3-1b" and cell.gpus == 2 and usual
    ours = cell.package == OURS and cell.mode.endswith("_fsdp_bk") and not cell.deferred
    return size and known and (ours or not cell.private)


def _pair(size: Size) -> tuple[int, int]:
    return size.batch, size.tokens


def _file(cell: Cell) -> str:
    return cell.call.split()[0]


def _ratios(cell: Cell, cells: list[Cell]) -> tuple[float, float]:
    plain = measured.baseline(cell, cells)
    if plain is None:
        raise ValueError(f"{cell.call}: no non-private step beside {cell.mode} {cell.place}")
    return cell.ms / plain.ms, cell.peak_gb / plain.peak_gb


def _aimed(ratio: float, aim: float) -> str:
    text = f"{ratio:.2f}"
    return text if ratio <= aim else f"**{text}**"


# Tables by name.
AGAINST_OPACUS: dict[str, Callable[[], str]] = {
    "one-card": one_card,
    "several-cards": several_cards,
}
AIMS: dict[str, Callable[[], str]] = {"targets": targets}
