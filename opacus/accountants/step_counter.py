"""Counts optimizer steps with an accountant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from opacus.accountants.history import check_sample_rate, rate_of_step
from opacus.accountants.sampling import Sampling


class Records(Protocol):
    """The part of an accountant that records steps."""

    def step(self, *, noise_multiplier: float, sample_rate: float, sampling: Any = None) -> None:
        """Record one step."""


class Count(NamedTuple):
    """One step, about to be recorded."""

    accountant: Any
    sample_rate: float
    sampling: Sampling | None

    def record(self, noise_multiplier: float) -> None:
        """Record the step, which has noise of this multiplier."""
        self.accountant.step(**self._step(noise_multiplier))

    def withdraw(self, noise_multiplier: float) -> None:
        """Take back one that :meth:`record` recorded, if the accountant can."""
        withdraw = getattr(self.accountant, "withdraw", None)
        if withdraw is not None:
            withdraw(**self._step(noise_multiplier))

    def _step(self, noise_multiplier: float) -> dict[str, Any]:
        how = {} if self.sampling is None else {"sampling": self.sampling}
        return {"noise_multiplier": noise_multiplier, "sample_rate": self.sample_rate, **how}


class StepCounter:
    """Records a step each time it is called with a DP optimizer that takes one.

    A DP optimizer that got it by ``attach_step_hook`` counts with it inside the step; calling it
    is then without effect, so that no step counts twice.

    Args:
        accountant: gives the accountant to record with, asked at each step.
        sample_rate: probability of one sample being in one batch of the data loader, in [0, 1].
        sampling: how that batch is drawn; None for plain Poisson sampling.

    Raises:
        TypeError, ValueError: if the rate is not a probability.
    """

    def __init__(
        self,
        accountant: Callable[[], Records],
        sample_rate: float,
        sampling: Sampling | None = None,
    ) -> None:
        self._accountant = accountant
        self.sample_rate = check_sample_rate(sample_rate)
        self.sampling = sampling

    @property
    def accountant(self) -> Any:
        """The accountant at this moment."""
        return self._accountant()

    def count_of(self, batches: int) -> Count:
        """The count of one step that sums over `batches` batches.

        Raises:
            ValueError: So many batches cannot be one step.
        """
        if self.sampling is not None and batches != 1:
            raise ValueError(
                f"{batches} batches of {self.sampling} went into one step, which is not the "
                "sampling that was announced; call step() after each batch"
            )
        return Count(self.accountant, rate_of_step(self.sample_rate, batches), self.sampling)

    def __call__(self, optimizer: Any) -> None:
        """Record a step with the current ``noise_multiplier`` and ``accumulated_iterations``."""
        counts_for = getattr(optimizer, "counts_for", None)
        if counts_for is None or not counts_for(self.accountant):
            self.count_of(optimizer.accumulated_iterations).record(optimizer.noise_multiplier)


def counts(counters: Sequence[StepCounter], batches: int) -> list[Count]:
    """One count for each accountant among ``counters``.

    Args:
        counters: where several have the same accountant, the largest rate holds.
        batches: number of batches that are summed in the step.

    Raises:
        ValueError: so many batches cannot be one step.
    """
    found: dict[int, Count] = {}
    for counter in counters:
        count = counter.count_of(batches)
        known = found.get(id(count.accountant))
        if known is None or count.sample_rate > known.sample_rate:
            found[id(count.accountant)] = count
    return list(found.values())
