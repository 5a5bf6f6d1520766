"""What ``memory_test/results`` holds, as cells that can be compared, whoever wrote the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memory_test.common import schema

RESULTS = schema.RESULTS
NON_PRIVATE = ("no_dp", "no_dp_single")
OURS = "this package"


@dataclass(frozen=True)
class Cell:
    """One measured step.

    Attributes:
        call: What was measured together: name of the file, and of the call in it.
        gpus: Number of GPUs.
        card: Their name.
        model: A built-in shape.
        mode: As in ``single_experiment.py``.
        package: :data:`OURS`, that of the non-private step, or another.
        batch: Samples a GPU.
        tokens: Of a sample.
        deferred: Whether norms were deferred.
        ms: Median time of a step.
        peak_gb: Peak memory in GiB.
    """

    call: str
    gpus: int
    card: str
    model: str
    mode: str
    package: str
    batch: int
    tokens: int
    deferred: bool
    ms: float
    peak_gb: float

    @property
    def private(self) -> bool:
        """Whether gradients were clipped and noised."""
        return self.mode not in NON_PRIVATE

    @property
    def place(self) -> str:
        """Batch, tokens and cards, for tables."""
        return f"{self.batch} x {self.tokens}, {self.gpus} {self.card}"

    def is_like(self, other: Cell) -> bool:
        """Whether both do the same work in the same call."""
        return _work(self) == _work(other)


def _work(cell: Cell) -> tuple[Any, ...]:
    return cell.call, cell.gpus, cell.model, cell.batch, cell.tokens


def files() -> dict[str, dict[str, Any]]:
    """All files, by name; parts that a file lacks are empty."""
    return {path.stem: found for path, found in schema.all_files(RESULTS)}


def all_cells() -> list[Cell]:
    """All cells, file by file."""
    cells = []
    for name, found in files().items():
        cells += _of_steps(name, found)
        cells += [_of_result(name, result) for result in found["results"]]
        cells += _of_whole_steps(name, found)
    return cells


def baseline(cell: Cell, cells: list[Cell]) -> Cell | None:
    """The non-private step of the same work."""
    return next((c for c in cells if not c.private and c.is_like(cell)), None)


@dataclass(frozen=True)
class Pair:
    """A step with immediate norms and the same with deferred ones.

    Attributes:
        mode, model, tokens: As in :class:`Cell`.
        place: Batch, tokens and cards, for tables.
        immediate_ms, deferred_ms: Times of a step.
        growth: Of the peak memory by deferring, as a share.
        file: Where it was read.
        adapters: Rank of LoRA adapters, 0 for none.
    """

    mode: str
    model: str
    tokens: int
    place: str
    immediate_ms: float
    deferred_ms: float
    growth: float
    file: str
    adapters: int = 0

    @property
    def speedup(self) -> float:
        """By deferring; below 1 it is slower."""
        return self.immediate_ms / self.deferred_ms


def deferred_pairs() -> list[Pair]:
    """All pairs of this package that differ in nothing but deferring."""
    cells = all_cells()
    pairs = [
        Pair(one.mode, one.model, one.tokens, one.place, one.ms, other.ms,
             other.peak_gb / one.peak_gb - 1, one.call.split()[0])
        for one in cells
        for other in cells
        if one.private and not one.deferred and other.deferred
        and one.package == other.package == OURS
        and one.mode == other.mode and one.is_like(other)
    ]  # fmt: skip
    return pairs + [_in_turn(name, row) for name, row in rounds_in_turn()]


def rounds_in_turn() -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of ``test_deferred_norm.py``, and the names of their files."""
    for name, found in files().items():
        yield from ((name, row) for run in found["deferred"] for row in run["rows"])


def _in_turn(name: str, row: dict[str, Any]) -> Pair:
    cards = f"{row['num_processes']} {short(row['device'])}"
    adapters = row["config"]["lora_rank"]
    return Pair(
        mode=row["mode"],
        model=row["model"],
        tokens=row["seq_length"],
        place=f"{row['batch_size']} x {row['seq_length']}, {cards}"
        + (f", LoRA {adapters}" if adapters else ""),
        immediate_ms=row["immediate_ms"],
        deferred_ms=row["deferred_ms"],
        growth=row["memory_growth"],
        file=name,
        adapters=adapters,
    )


def _of_steps(name: str, found: dict[str, Any]) -> Iterator[Cell]:
    alone = found.get("world") == 1
    for cell in found["cells"]:
        if alone and cell["wrapping"] != "single":
            continue  # FSDP2 on one card
        for row in cell["rows"]:
            compiled = "compiled" in row["mode"] or row.get("compiled", False)
            special = cell["lora_rank"] or compiled or row.get("features")
            if row["status"] != "ok" or special:
                continue
            yield Cell(
                call=name + _kind(cell),
                gpus=found["world"],
                card=short(found["device"]),
                model=cell["model"],
                mode=row["mode"],
                package=row["package"],
                batch=cell["batch"],
                tokens=cell["tokens"],
                deferred=row["deferred"],
                ms=row["ms"]["median"],
                peak_gb=row["peak_gb"],
            )


def _of_whole_steps(name: str, found: dict[str, Any]) -> Iterator[Cell]:
    """Steps of full training in eager mode, but for those under FSDP2 on one card."""
    for row in found["whole_steps"]:
        mode = {"nondp": "no_dp"}.get(row["case"], row["case"])
        special = any(row.get(key) for key in ("lora", "checkpointing", "offload"))
        alone = found.get("world") == 1 and "single" not in name
        if special or alone or not mode.isidentifier():
            continue
        yield Cell(
            call=f"{name} {row['call']}",
            gpus=found["world"],
            card=short(found["device"]),
            model=f"llama3-{row['model']}",
            mode=mode,
            package=OURS if mode != "no_dp" else "non-private",
            batch=row["batch"],
            tokens=row["seq"],
            deferred=False,
            ms=row["ms"],
            peak_gb=row["peak_gb"],
        )


def _kind(cell: dict[str, Any]) -> str:
    words = (
        cell["wrapping"] if cell["wrapping"] not in ("blocks", "single") else "",
        "checkpointing" * cell["checkpointing"],
        "half" * cell.get("half", False),
        "adamw" * (cell.get("optimizer") == "adamw"),
        str(cell.get("call", "")),
    )
    return "".join(f" {word}" for word in words if word)


def _of_result(name: str, result: dict[str, Any]) -> Cell:
    checkpointing = result["config"].get("checkpointing")
    return Cell(
        call=f"{name}{' checkpointing' if checkpointing else ''}",
        gpus=result["num_gpus"],
        card=short(result["device"]),
        model=result["model"],
        mode=result["mode"],
        package="non-private" if result["mode"] in NON_PRIVATE else OURS,
        batch=result["batch_size"],
        tokens=result["seq_length"],
        deferred=result["deferred"],
        ms=result["median_time_ms"],
        peak_gb=result["peak_memory_gb"],
    )


def short(device: str) -> str:
    """The name of a card without maker and memory."""
    words = [w for w in device.split() if w not in ("NVIDIA", "HBM3", "80GB")]
    return " ".join(words) or "GPU"
