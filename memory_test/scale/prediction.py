"""Puts memory and time of a run together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memory_test.scale.duration import Duration, duration_of
from memory_test.scale.held import held_bytes
from memory_test.scale.memory import Memory, memory_of
from memory_test.scale.rates import Rates
from memory_test.scale.run import NON_PRIVATE, Run

GB = 2**30


@dataclass(frozen=True)
class Prediction:
    """What a run will need on each rank.

    Attributes:
        run: What was asked.
        memory: Of the run.
        duration: Of the run.
        plain_memory: Of the non-private step of the same run.
        plain_duration: Of the non-private step.
        capacity: Bytes of the card.
        held: Bytes that a single backward pass keeps until the clipped sum; else 0.
    """

    run: Run
    memory: Memory
    duration: Duration
    plain_memory: Memory
    plain_duration: Duration
    capacity: float
    held: float

    @property
    def fits(self) -> bool:
        """Whether the peak is within the card's memory."""
        return self.memory.peak <= self.capacity

    def record(self) -> dict[str, Any]:
        """As JSON: GiB and milliseconds."""
        return {
            "step_ms": round(self.duration.step * 1e3, 1),
            "bound_by": self.duration.bound_by,
            "host_ms": round(self.duration.host * 1e3, 1),
            "device_ms": {k: round(v * 1e3, 2) for k, v in self.duration.device.items()},
            "hidden_communication_ms": round(self.duration.hidden * 1e3, 2),
            "peak_gb": round(self.memory.peak / GB, 2),
            "peak_when": self.memory.when,
            "moments_gb": {k: round(v / GB, 2) for k, v in self.memory.moments.items()},
            "state_gb": round(self.memory.state / GB, 2),
            "held_gb": round(self.held / GB, 2),
            "capacity_gb": round(self.capacity / GB, 1),
            "fits": self.fits,
            "time_ratio": round(self.duration.step / self.plain_duration.step, 3),
            "memory_ratio": round(self.memory.peak / self.plain_memory.peak, 3),
        }


def predict(run: Run, rates: Rates) -> Prediction:
    """Memory and time of ``run``, and of its non-private step. Allocates nothing."""
    plain = replace(run, mode=NON_PRIVATE, deferred=False)
    held = held_bytes(run, rates).total if run.strategy == "one_pass" else 0.0
    return Prediction(
        run,
        memory_of(run, rates),
        duration_of(run, rates),
        memory_of(plain, rates),
        duration_of(plain, rates),
        rates.memory_bytes,
        held,
    )
