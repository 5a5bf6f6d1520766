"""Memory over time: from a trace on any device, and each allocation on a GPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memory_test.common.memory import MB
from memory_test.common.results import write_bytes
from memory_test.torch_profile.traces import Event, PhaseMap

POINTS = 400
MAX_ENTRIES = 500_000
_CPU, _CUDA = 0, 1  # as the profiler numbers devices


def memory_summary(trace: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """How much is allocated over the profiled steps.

    On a GPU: by its allocator, so with weights. On the CPU: since the profiler started, so without
    what was there before.

    Returns:
        ``peak_mb`` and the phase it falls in, ``start_mb``, the peak within each phase, and
        the curve as pairs of milliseconds and MB.
    """
    events = trace["traceEvents"]
    wanted = _CUDA if device.type == "cuda" else _CPU
    changes = sorted((e for e in events if _on_device(e, wanted)), key=lambda e: e["ts"])
    if not changes:
        return {
            "peak_mb": 0.0,
            "start_mb": 0.0,
            "peak_phase": "other",
            "phases_mb": {},
            "curve": [],
        }
    phases = PhaseMap(events)
    first = changes[0]["args"]
    start = first["Total Allocated"] - first["Bytes"]
    before = 0 if wanted == _CUDA else start
    by_phase: dict[str, float] = {}
    curve = []
    for event in changes:
        value = (event["args"]["Total Allocated"] - before) / MB
        phase = phases.at(event["ts"])
        by_phase[phase] = max(by_phase.get(phase, 0.0), value)
        curve.append(((event["ts"] - changes[0]["ts"]) / 1e3, value))
    return {
        "peak_mb": round(max(by_phase.values()), 3),
        "peak_phase": max(by_phase, key=lambda name: by_phase[name]),
        "start_mb": round((start - before) / MB, 3),
        "phases_mb": {phase: round(value, 3) for phase, value in by_phase.items()},
        "curve": thinned(curve),
    }


def _on_device(event: Event, device: int) -> bool:
    return event.get("name") == "[memory]" and event["args"].get("Device Type") == device


def thinned(curve: list[tuple[float, float]]) -> list[list[float]]:
    """At most about :data:`POINTS` points of a curve: the largest value of each stretch."""
    size = -(-len(curve) // POINTS)
    pieces = [curve[i : i + size] for i in range(0, len(curve), size)]
    highest = [max(piece, key=lambda point: point[1]) for piece in pieces]
    return [[round(moment, 3), round(value, 3)] for moment, value in highest]


def record_snapshot(step: Callable[[], Any], path: Path, device: torch.device) -> Path:
    """Record each allocation of one step on a GPU, with the Python code that made it.

    The file is for https://docs.pytorch.org/memory_viz.

    Args:
        step: Does one step.
        path: File to write; an earlier one stays until the new one is complete.
        device: A GPU.
    """
    torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
    try:
        step()
        torch.cuda.synchronize(device)
        found = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    write_bytes(path, pickle.dumps(found))
    return path
