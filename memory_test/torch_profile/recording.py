"""One trainer, timed and under the profiler: trace, kernels, memory."""

from __future__ import annotations

import gzip
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from memory_test.common.failures import StorageError
from memory_test.common.memory import MB, peak_mb, reset_peak
from memory_test.common.results import time_summary
from memory_test.common.timing import milliseconds, wait_for
from memory_test.torch_profile.kernel_kinds import kernels_of, summary
from memory_test.torch_profile.snapshots import memory_summary, record_snapshot
from memory_test.torch_profile.traces import check_trace, find_traces, read_trace

Step = Callable[[], Any]


def measure_times(step: Step, device: torch.device, count: int) -> dict[str, Any]:
    """Milliseconds of ``count`` steps, and the peak of their memory."""
    reset_peak(device)
    times = [milliseconds(step, device) for _ in range(count)]
    return {**time_summary(times), "peak_memory_mb": round(peak_mb(device), 1)}


def record(
    step: Step,
    folder: Path,
    name: str,
    device: torch.device,
    *,
    steps: int = 1,
    stacks: bool = False,
) -> dict[str, Any]:
    """Run ``steps`` steps under the profiler, after one other, and keep its trace.

    An earlier trace there is replaced once the new one is complete.

    Args:
        step: Does one step.
        folder: Folder of the run.
        name: What TensorBoard calls the process.
        device: Where the work is done.
        steps: Number of steps.
        stacks: Whether to record Python's stack of each operator; the trace becomes large.

    Returns:
        The file and its faults, the kernels by kind, and the memory over time.

    Raises:
        StorageError: The trace could not be written whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial_", dir=folder))
    try:
        _profile(step, partial, name, device, steps, stacks)
        written, trace = _read(partial)
        kept = folder / written.name
        for earlier in find_traces(folder):
            if earlier.parent != partial:
                earlier.unlink()
        written.replace(kept)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {
        "trace": kept.name,
        "trace_mb": round(kept.stat().st_size / MB, 2),
        "trace_faults": check_trace(trace, needs_kernels=device.type == "cuda"),
        "profiled_steps": steps,
        "kernels": summary(kernels_of(trace), steps),
        "memory": memory_summary(trace, device),
    }


def snapshot(step: Step, folder: Path, device: torch.device) -> str | None:
    """Record each allocation of one more step; the file's name, or nothing on the CPU."""
    if device.type != "cuda":
        return None
    return record_snapshot(step, folder / "snapshot.pickle", device).name


def _profile(
    step: Step, folder: Path, name: str, device: torch.device, steps: int, stacks: bool
) -> None:
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    profiler = profile(
        activities=[ProfilerActivity.CPU, *cuda],
        # The first step under the profiler pays for starting it.
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=name),
        record_shapes=True,
        profile_memory=True,
        with_stack=stacks,
    )
    with warnings.catch_warnings():
        # There is one cycle, and the trace has it all.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        with profiler:
            for _ in range(1 + steps):
                step()
                wait_for(device)
                profiler.step()
    for path in find_traces(folder):
        _compress(path)


def _compress(path: Path) -> None:
    """In one piece: torch writes a compressed trace line by line, four times as long."""
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 6))
    path.unlink()


def _read(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The trace that the profiler left, which says nothing when the disk is full."""
    written = find_traces(folder)
    with suppress(IndexError, ValueError):
        return written[0], read_trace(written[0])
    raise StorageError(f"the trace in {folder.parent} was not written whole: is the disk full?")


def device_name(device: torch.device) -> str:
    """What the device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})"
