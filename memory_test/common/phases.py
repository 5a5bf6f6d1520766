"""A clock for the phases of a step: CUDA events on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# In the order of tables and plots. "reduction" is the time that sums of gradients over ranks
# are under way; FSDP2 overlaps it with other phases, so it is no part of their sum.
PHASES = (
    "forward",
    "first_backward",
    "parallel_norms",
    "clip_factors",
    "second_backward",
    "weighted_sum",
    "noise",
    "step",
    "other",
)
COLLECTIVES = {
    "reduce_scatter": ("reducescatter", "reduce_scatter"),
    "all_gather": ("allgather", "all_gather"),
    "all_reduce": ("allreduce", "all_reduce"),
}


class PhaseClock:
    """Times phases, of which one can lie in another: a phase does not count what is inside it.

    Args:
        device: Where the work is done. On a GPU a mark is an event in the current stream, so
            a phase lasts from the end of the work before it to the end of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._running: list[str] = []
        self._since: Any = None
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as ``name``."""
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Count the time of calls of ``owner.method`` as ``name``, if there is such a method."""
        inner: Callable[..., Any] | None = getattr(owner, method, None)
        if inner is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Milliseconds of each phase since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spans, self._spans = self._spans, []
        total: dict[str, float] = {}
        for name, start, end in spans:
            total[name] = total.get(name, 0.0) + self._between(start, end)
        return total

    def _switch(self) -> None:
        now = self._mark()
        if self._running:
            self._spans.append((self._running[-1], self._since, now))
        self._since = now

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self.device.type == "cuda" else (end - start) * 1e3


def watch_private_step(clock: PhaseClock, model: Any, optimizer: Any) -> None:
    """Count the parts of a private step, through the methods of its model and optimizer.

    What they lack (``pip opacus`` has other methods) stays in the phase around it.
    """
    one_pass = getattr(model, "book_keeping", False)
    clock.wrap(model, "compute_all_norms_parallel", "parallel_norms")
    clock.wrap(model, "clip", "clip_factors")
    clock.wrap(model, "sum_pass", "weighted_sum" if one_pass else "second_backward")
    if not hasattr(model, "norm_pass"):
        clock.wrap(model, "get_norm_sample", "parallel_norms")
        clock.wrap(model, "get_clipping_coef", "clip_factors")
    if not hasattr(model, "max_grad_norm"):  # per-sample gradients: the optimizer clips
        clock.wrap(optimizer, "clip_and_accumulate", "weighted_sum")
    clock.wrap(optimizer, "add_noise", "noise")


def collective_times(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds that each kind of collective is under way in one call of ``step``.

    Of kernels on a GPU, of the backend's operations on the CPU.
    """
    cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, activity.CUDA] if cuda else [activity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        if cuda:
            torch.cuda.synchronize(device)
    return times_of_collectives(profile.events() or (), cuda)


def times_of_collectives(events: Iterable[Any], cuda: bool) -> dict[str, float]:
    """Milliseconds of each kind of collective among the events of a profile.

    On a GPU ``nccl:...`` are the ranges around the kernels; only the kernels count.
    """
    total = dict.fromkeys(COLLECTIVES, 0.0)
    for event in events:
        name = event.name.lower()
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        kernel = name.startswith("nccl") and not name.startswith("nccl:")
        if on_device != cuda or not (kernel if cuda else name.startswith("gloo:")):
            continue
        for kind, words in COLLECTIVES.items():
            if any(word in name for word in words):
                total[kind] += event.time_range.elapsed_us() / 1e3
    return total
