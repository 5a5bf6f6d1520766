"""Every measured cell that the cost model covers, and which package it measured.

Reads all files of ``memory_test/results``, of ``steps.py`` and of series.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.schema import PARTS
from memory_test.scale import MODES as MODELLED
from memory_test.scale import SHAPES, Run

# Cells by which rates.json was fitted: file, mode, batch, tokens. Rates of the device were fitted
# to a call whose file is not kept; the same cells of the next call are not counted as checks.
FIRST = "llama3-1b_h200x2_2026-11-28_one_pass"
LATER, LAST = f"{FIRST}_later", f"{FIRST}_last"
BY_TURNS = "llama3-1b_h200x2_2026-11-28_steps_deferred"
IN_SERIES = "llama3-1b_h200x2_2026-11-28_series"
WHOLE = "llama3_h200x2_2026-11-29_whole_steps"
BUDGETS = "llama3-3b_h200_2026-11-29_budgets"
FITTED = {
    (FIRST, "no_dp", 2, 8192), (FIRST, "no_dp", 4, 4096), (FIRST, "no_dp", 16, 1024),
    (FIRST, "no_dp", 16, 512), (FIRST, "ghost_fsdp_bk", 16, 1024),
    (FIRST, "ghost_fsdp_bk", 2, 8192),
    ("llama3-1b_h100x2_2026-11-28_two_pass", "no_dp", 4, 4096),
    # Ratios of the host's time: of each call of today's package its smallest cell.
    (LATER, "ghost_fsdp_bk", 1, 1024), (IN_SERIES, "ghost_fsdp_bk", 1, 1024),
    (LAST, "ghost_fsdp_bk", 4, 1024), (WHOLE, "ghost_fsdp_bk", 1, 1024),
    (IN_SERIES, "flash_fsdp_bk", 1, 1024), (LAST, "flash_fsdp_bk", 4, 1024),
    (IN_SERIES, "ghost_fsdp", 1, 1024),
    (BY_TURNS, "ghost_fsdp", 1, 2048), (BY_TURNS, "flash_fsdp", 1, 2048),
    # How long a replay takes.
    (BUDGETS, "ghost_fsdp_bk", 4, 4096),
}  # fmt: skip
# Files from before noise was added by one kernel and layers took less host time.
EARLIER_HOST = {
    "llama3-1b_h100x2_2026-11-28_two_pass",
    "llama3-1b_h200x2_2026-11-28_two_pass",
    "llama3-1b_h200x2_2026-11-28_one_pass_earlier",
    FIRST,
}
# How much of the host's time a step took then, relative to the non-private step.
EARLIER_RATIOS = {"host_ratio_one_pass": 1.23, "host_ratio_one_pass_flash": 1.23,
                  "host_ratio_two_pass": 2.62}  # fmt: skip
# Files from before deferred norms were limited to a twentieth of the memory in use: without a
# limit, or with a twentieth of the whole device.
EARLIER_DEFERRED = {
    "llama3-1b_h100x2_2026-11-28_two_pass",
    "llama3-1b_h200x2_2026-11-28_two_pass",
    IN_SERIES,
}


@dataclass(frozen=True)
class Measured:
    """One measured cell.

    Attributes:
        file: Name of the result file.
        card: ``"h100"`` or ``"h200"``.
        run: The same for the cost model.
        ms: Median time of a step.
        peak_gb: Peak memory in GiB.
        call: Number of the call in a file of several, which ran on different hosts.
    """

    file: str
    card: str
    run: Run
    ms: float
    peak_gb: float
    call: int = 0

    @property
    def fitted(self) -> bool:
        """Whether rates were fitted to its time."""
        run = self.run
        return not run.deferred and (self.file, run.mode, run.batch, run.tokens) in FITTED

    @property
    def earlier_time(self) -> bool:
        """Whether the package took more of the host's time when this was measured."""
        return self.run.private and self.file in EARLIER_HOST

    @property
    def earlier_memory(self) -> bool:
        """Whether the package held more memory when this was measured."""
        run = self.run
        waits = run.deferred and run.strategy == "two_pass"
        return waits and self.file in EARLIER_DEFERRED


def cells_of(path: Path) -> Iterator[Measured]:
    """Cells of a file that the model covers: this package or non-private, FSDP2 or one card."""
    found = {**dict.fromkeys(PARTS, ()), **json.loads(path.read_text())}
    yield from _of_steps(path.stem, found)
    yield from _of_series(path.stem, found)
    yield from _of_whole_steps(path.stem, found)


def _of_steps(name: str, found: dict[str, Any]) -> Iterator[Measured]:
    for cell in found["cells"]:
        card = _card(found["device"])
        plain = cell["wrapping"] in ("blocks", "single") and not cell["lora_rank"]
        plain = plain and cell.get("optimizer", "sgd") == "sgd" and not cell.get("half")
        for row in cell["rows"]:
            ours = not row["private"] or row["package"] == "this package"
            ours = ours and row["status"] == "ok"
            # Compiled blocks are not modelled, nor other features.
            ours = ours and not row.get("compiled", False)
            ours = ours and all(f.startswith(HOW_HELD) for f in row.get("features", ()))
            if not (card and plain and ours) or cell["model"] not in SHAPES:
                continue
            # Earlier scripts held the model's output in a variable; those of today do not.
            run = _run(cell["model"], found["world"], cell, row["mode"], row["deferred"],
                       checkpointing=cell["checkpointing"],
                       holds=cell.get("holds_logits", False),
                       wrapped=cell["wrapping"] == "blocks")  # fmt: skip
            if run is not None:
                yield Measured(name, card, _as_held(run, row), row["ms"]["median"],
                               row["peak_gb"], cell.get("call", 0))  # fmt: skip


def _as_held(run: Run, row: dict[str, Any]) -> Run:
    """The run with as many blocks sent to the host, and run again, as the row says."""
    ways, layers = row.get("ways") or {}, run.shape.layers
    block = (sum(ways.values()) or 1) / layers
    away, again = (round(ways.get(way, 0) / block) for way in ("offload", "replay"))
    return replace(
        run,
        stored=1 if "float8" in row.get("features", ()) else run.stored,
        held_blocks=layers - away - again if away + again else run.held_blocks,
        offloaded_blocks=away,
    )


def _of_series(name: str, found: dict[str, Any]) -> Iterator[Measured]:
    for result in found["results"]:
        card, config = _card(result["device"]), result["config"]
        plain = not config["lora_rank"] and config["optimizer"] == "sgd"
        if not (card and plain) or result["model"] not in SHAPES:
            continue
        cell = {"batch": result["batch_size"], "tokens": result["seq_length"]}
        run = _run(result["model"], result["num_gpus"], cell, result["mode"],
                   bool(result["deferred"]), checkpointing=config["checkpointing"])  # fmt: skip
        if run is not None:
            yield Measured(name, card, run, result["median_time_ms"], result["peak_memory_gb"])


def _of_whole_steps(name: str, found: dict[str, Any]) -> Iterator[Measured]:
    """Steps of one script, on any number of ranks; its loop holds the logits."""
    wrapped = "without FSDP2" not in found.get("what", "")
    for row in found["whole_steps"]:
        card, model = _card(found["device"]), f"llama3-{row['model']}"
        plain = not row.get("lora") and not row.get("offload")
        if not (card and plain) or model not in SHAPES or row["case"] not in MODELLED_CASES:
            continue
        ways = row.get("ways") or {}
        again = ways.get("replay", 0) / (sum(ways.values()) or 1)
        shape, stored = SHAPES[model], row.get("stored_dtype")
        run = Run(
            shape, found["world"], row["seq"], row["batch"], MODELLED_CASES[row["case"]],
            row.get("checkpointing", False), stored=1 if stored == "float8" else 2,
            held_blocks=None if not again else shape.layers - round(again * (shape.layers + 1)),
            wrapped=wrapped,
        )  # fmt: skip
        yield Measured(name, card, run, row["ms"], row["peak_gb"], row.get("call", 0))


# Features that say where per-sample gradients wait, and in which type.
HOW_HELD = ("budget=", "host=", "float8")
# Of the whole steps; those with compiled blocks, without logits or of earlier packages are not
# modelled.
MODELLED_CASES = {"nondp": "no_dp", **{mode: mode for mode in MODELLED if mode != "no_dp"}}


def _run(
    model: str,
    world: int,
    cell: dict[str, Any],
    mode: str,
    deferred: bool,
    *,
    checkpointing: bool = False,
    holds: bool = False,
    wrapped: bool | None = None,
) -> Run | None:
    mode = "no_dp" if mode == "no_dp_single" else mode
    if mode not in MODELLED or (world == 1 and not wrapped and mode != "no_dp"):
        return None
    return Run(SHAPES[model], world, cell["tokens"], cell["batch"], mode, checkpointing, deferred,
               holds_logits=holds, wrapped=wrapped)  # fmt: skip


def _card(name: str) -> str:
    return next((card for card in ("h100", "h200") if card in name.lower()), "")
