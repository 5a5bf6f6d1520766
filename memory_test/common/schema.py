"""The one layout of result files, ``memory_test/results``: what each holds, and its check.

A file has :data:`HEAD` and at least one of :data:`PARTS`, each a list of rows. Rows may say more
than is asked for here. ``archive/`` holds what later files have measured again.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LAYOUT = "results 1"
RESULTS = Path(__file__).resolve().parents[1] / "results"
# MODEL_CARDS_DATE_WHAT: the model, or what was measured instead of one.
NAME = re.compile(r"[a-z0-9-]+_[a-z0-9]+_\d{4}-\d\d-\d\d_[a-z0-9_]+\.json")

NUMBER = (int, float)
Kinds = Mapping[str, Any]  # a type or some, ``None`` for null; a list of one Kinds: rows

HEAD: Kinds = {
    "layout": str, "what": str, "date": str, "device": str, "world": int, "versions": dict,
}  # fmt: skip
# A step of a series: memory_test/fsdp_llama3_profiling.
RESULT: Kinds = {
    "status": str, "mode": str, "model": str, "task": str, "seq_length": int, "batch_size": int,
    "total_batch_size": int, "num_gpus": int, "num_processes": int, "deferred": bool,
    "peak_memory_mb": NUMBER, "peak_memory_gb": NUMBER,
    "avg_time_ms": NUMBER, "median_time_ms": NUMBER, "min_time_ms": NUMBER, "max_time_ms": NUMBER,
    "times_ms": list, "phases_ms": dict, "collectives_ms": dict, "memory_mb": dict,
    "config": dict, "device": str, "versions": dict, "date": str,
}  # fmt: skip
# A step of benchmarks/steps.py: of a mode, in the model and batch of its cell.
STEP: Kinds = {
    "mode": str, "deferred": bool, "private": bool, "package": str, "status": str, "checks": list,
}  # fmt: skip
MEASURED: Kinds = {"ms": dict, "peak_gb": NUMBER}
RATIOS: Kinds = {"ratio": NUMBER, "ratio_quartiles": list, "memory_ratio": NUMBER}
STATUSES = ("ok", "refused", "out_of_memory", "failed")
BASE = "no_dp"
CELL: Kinds = {
    "model": str, "parameters": int, "trainable_parameters": int, "batch": int, "tokens": int,
    "wrapping": str, "lora_rank": int, "checkpointing": bool, "dtype": str, "rows": [STEP],
}  # fmt: skip
IN_TURNS: Kinds = {
    "mode": str, "model": str, "seq_length": int, "batch_size": int, "num_processes": int,
    "speedup": NUMBER, "memory_growth": NUMBER, "immediate_ms": NUMBER, "deferred_ms": NUMBER,
    "immediate_peak_mb": NUMBER, "device": str, "config": dict,
}  # fmt: skip
NORM_COST: Kinds = {
    "layout": str, "backend": str, "seq_length": int, "samples": int, "layers": int,
    "local_ms": NUMBER, "reduction_ms": NUMBER, "total_ms": NUMBER,
}  # fmt: skip

PARTS: dict[str, Kinds] = {
    "cells": CELL,
    "results": RESULT,
    "failures": {"status": str, "kind": str, "error": str},
    "deferred": {"passed": bool, "rows": [IN_TURNS]},
    "norms": {"model": str, "num_processes": int, "device": str, "rows": [NORM_COST]},
    "accuracy": {"ranks": int, "device": str, "rows": list, "alone": dict},
    "profiles": {"trainer": str, "batch_size": int, "seq_length": int, "median_time_ms": NUMBER,
                 "kernels": dict, "memory": dict, "device": str},
    "packages": {"case": str, "mode": str, "this package": dict, "time_ratio": NUMBER},
    "kernels": {"section": str, "error": NUMBER, "ms": dict},
    "launches": {"of": str, "us": dict},
    "tests": {"what": str, "cards": int},
    "times": {"mode": str, "batch": int, "tokens": int, "ms": NUMBER, "issued_ms": NUMBER,
              "gpu_ms": NUMBER},
    "families": {"model": str, "trained": str, "mode": str, "batch": int, "tokens": int,
                 "ms": (*NUMBER, dict, None)},
    "nearly_full": {"model": str, "mode": str, "batch": int, "tokens": int,
                    "share": (*NUMBER, None), "ms": (*NUMBER, None), "peak_gb": NUMBER,
                    "times_ms": list, "out_of_memory": list},
    "isolation": {"mode": str, "batch": int, "tokens": int, "ms": dict, "share": NUMBER},
    "whole_steps": {"case": str, "model": str, "batch": int, "seq": int, "ms": NUMBER,
                    "ratio": NUMBER},
    "trainers": {"trainer": str, "model": str, "batch": int, "tokens": int, "checkpointing": bool,
                 "times_ms": list},
    "finetuning": {"trained": str, "trainer": str, "epsilon": (*NUMBER, None), "tried": bool},
    "stored_dtypes": {"stored": str, "seed": int, "accuracy": NUMBER, "loss": NUMBER},
    "on_paper": {"model": str, "cards": int, "batch": int, "peak_gib": NUMBER, "fits": bool,
                 "ratio": NUMBER, "tokens_per_second": int, "breaks_first": str},
    "noise_kernels": {"generator": str, "elements": int, "ms": NUMBER},
    "noise": {"accountant": str, "target": NUMBER, "delta": NUMBER, "rate": NUMBER, "steps": int,
              "seconds": NUMBER},
    "utility": {"task": str, "contender": str, "optimizer": str, "clipping": str, "noise": str,
                "lr": NUMBER, "epsilon": NUMBER, "delta": NUMBER, "accuracies": list,
                "mean": NUMBER, "sd": NUMBER},
}  # fmt: skip
# What else a file of steps says of itself; "unchecked" says why its modes were not checked.
STEPS_HEAD: Kinds = {
    "device_memory_gb": (*NUMBER, None), "environment": dict, "command": list, "plan": dict,
}  # fmt: skip


def check_file(found: Any) -> list[str]:
    """What is wrong with the content of a result file; an empty list if nothing."""
    if not isinstance(found, dict) or found.get("layout") != LAYOUT:
        return [f"is not of the layout {LAYOUT}"]
    wrong = lacking(found, HEAD, "file")
    parts = [name for name in PARTS if name in found]
    for name in parts:
        wrong += lacking(found, {name: [PARTS[name]]}, "file")
    if "cells" in parts and not wrong:
        wrong += lacking(found, STEPS_HEAD, "file")
        for number, cell in enumerate(found["cells"]):
            wrong += _wrong_cell(cell, f"cell {number}", checked="unchecked" not in found)
    return wrong if parts else [*wrong, f"has none of {', '.join(PARTS)}"]


def lacking(found: Any, kinds: Kinds, where: str = "") -> list[str]:
    """Keys that an object lacks, and values of another kind."""
    if not isinstance(found, dict):
        return [f"{where} is no JSON object".strip()]
    wrong, of = [], f"{where}: " if where else ""
    for key, kind in kinds.items():
        if key not in found:
            wrong.append(f"{of}lacks {key}")
            continue
        value = found[key]
        inner = kind[0] if isinstance(kind, list) else None
        allowed = kind if isinstance(kind, tuple) else (list if inner is not None else kind,)
        null = None in allowed and value is None
        if not null and not isinstance(value, tuple(k for k in allowed if k is not None)):
            wrong.append(f"{of}{key} is a {type(value).__name__}")
        elif inner is not None:
            for number, row in enumerate(value):
                wrong += lacking(row, inner, f"{of}{key} {number}")
    return wrong


def _wrong_cell(cell: dict[str, Any], where: str, *, checked: bool) -> list[str]:
    rows = cell["rows"]
    compared = any(r["mode"] == BASE and r["status"] == "ok" for r in rows[:1])
    return [
        line
        for row in rows
        for line in _wrong_step(row, f"{where}, {row['mode']}", compared, checked)
    ]


def _wrong_step(row: dict[str, Any], where: str, compared: bool, checked: bool) -> list[str]:
    status = row["status"]
    if status not in STATUSES:
        return [f"{where}: status is {status!r}"]
    if status != "ok":
        return [f"{where}: {status}, but has times"] if "ms" in row else []
    wrong = lacking(row, {**MEASURED, **(RATIOS if compared and checked else {})}, where)
    ours = checked and row["private"] and row["package"] == "this package"
    if ours and not (row["checks"] and all(c.get("holds") for c in row["checks"])):
        wrong.append(f"{where}: reported without a check that holds")
    return wrong


def head(what: str, device: str, versions: Mapping[str, str], world: int = 1) -> dict[str, Any]:
    """The head of a file that is written now.

    Args:
        what: A sentence: what was measured, and how.
        device: Name of the card or processor; ``""`` for this machine's processor.
        versions: Of what was measured, by package.
        world: Number of processes.
    """
    return {
        "layout": LAYOUT,
        "what": what,
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}",
        "device": device or f"CPU ({platform.machine()})",
        "world": world,
        "versions": dict(versions),
    }


def versions() -> dict[str, str]:
    """Versions of what is measured now."""
    import torch

    import opacus

    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["opacus"] = opacus.__version__
    for name in ("transformers", "peft", "triton", "flash_attn"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", "?"))
    return found


def is_result_file(found: Any) -> bool:
    """Whether a JSON value says that it is of this layout."""
    return isinstance(found, dict) and found.get("layout") == LAYOUT


def all_files(folder: Path | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The result files of a folder and its archive, by name, with their content.

    Parts that a file lacks are empty.
    """
    paths = (folder or RESULTS).rglob("*.json")
    for path in sorted(paths, key=lambda path: path.name):
        found = json.loads(path.read_text())
        if is_result_file(found):
            yield path, {**{part: [] for part in PARTS}, **found}
