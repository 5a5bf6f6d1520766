"""Parts of a step as named ranges in the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import record_function

from memory_test.common.phases import PhaseClock

# In the order of tables. A phase does not count what is inside it: "backward" of the private
# trainers is what is left when per-sample gradients, norms and sums are taken out.
PHASES = (
    "forward",
    "backward",
    "per_sample_gradients",
    "per_sample_norms",
    "clip_factors",
    "second_backward",
    "weighted_sum",
    "noise",
    "optimizer",
    "step",
)


class Ranges(PhaseClock):
    """A :class:`PhaseClock` that marks phases for the profiler instead of timing them."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the block as ``name``."""
        with record_function(name):
            yield


def watch_private_step(ranges: Ranges, model: Any, optimizer: Any) -> None:
    """Mark the parts of a private step, through the methods of its model and optimizer.

    A method that is not there is left out: its work then counts to the phase around it.
    """
    _watch_layers(ranges, model)
    if hasattr(model, "sum_pass"):
        ranges.wrap(model, "compute_all_norms_parallel", "per_sample_norms")
        ranges.wrap(model, "clip", "clip_factors")
        ranges.wrap(model, "sum_pass", "second_backward")
    else:  # the optimizer clips
        ranges.wrap(optimizer, "clip_and_accumulate", "weighted_sum")
        ranges.wrap(optimizer, "_clip", "clip_factors")
        ranges.wrap(optimizer, "_norms", "per_sample_norms")
    ranges.wrap(optimizer, "add_noise", "noise")


def _watch_layers(ranges: Ranges, model: Any) -> None:
    """Mark what is done for each layer inside a backward pass."""
    recorder = getattr(model, "_recorder", None)
    if recorder is None:
        return
    receive = recorder.sink
    two_pass = hasattr(model, "sum_pass")
    summing: list[bool] = []

    def marked(record: Any) -> None:
        name = "per_sample_norms" if two_pass else "per_sample_gradients"
        with ranges.phase("weighted_sum" if summing else name):
            receive(record)

    recorder.sink = marked
    if two_pass:
        _note_calls(model, "sum_pass", summing)


def _note_calls(owner: Any, method: str, running: list[bool]) -> None:
    """Keep an entry in ``running`` while ``owner.method`` runs."""
    inner = getattr(owner, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        running.append(True)
        try:
            return inner(*args, **kwargs)
        finally:
            running.pop()

    setattr(owner, method, noted)
