"""Counts optimizer steps with an accountant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from opacus.accountants.history import check_sample_rate, rate_of_step


class CountsSteps(Protocol):
    """What a counter needs of an accountant."""

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one step."""


class StepCounter:
    """Records a step each time it is called with a DP optimizer that takes one.

    A DP optimizer that got it by ``attach_step_hook`` counts with it inside the step; calling it
    is then without effect, so that no step counts twice.

    Args:
        accountant: gives the accountant to record with, asked at each step.
        sample_rate: probability of one sample being in one batch of the data loader, in [0, 1].

    Raises:
        TypeError, ValueError: if the rate is not a probability.
    """

    def __init__(self, accountant: Callable[[], CountsSteps], sample_rate: float) -> None:
        self._accountant = accountant
        self.sample_rate = check_sample_rate(sample_rate)

    @property
    def accountant(self) -> CountsSteps:
        """The accountant at this moment."""
        return self._accountant()

    def __call__(self, optimizer: Any) -> None:
        """Record a step with the ``noise_multiplier`` and ``accumulated_iterations`` of now."""
        counts_for = getattr(optimizer, "counts_for", None)
        if counts_for is None or not counts_for(self.accountant):
            rate = rate_of_step(self.sample_rate, optimizer.accumulated_iterations)
            self.accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)


def entries(counters: Sequence[StepCounter], batches: int) -> list[tuple[CountsSteps, float]]:
    """Each accountant among ``counters`` once, with the sample rate of a step.

    Args:
        counters: where several have the same accountant, the largest rate holds.
        batches: number of batches that are summed in the step.

    Raises:
        ValueError: so many batches cannot be one step.
    """
    found: dict[int, tuple[CountsSteps, float]] = {}
    for counter in counters:
        accountant, rate = counter.accountant, rate_of_step(counter.sample_rate, batches)
        _, known = found.get(id(accountant), (accountant, 0.0))
        found[id(accountant)] = (accountant, max(rate, known))
    return list(found.values())
