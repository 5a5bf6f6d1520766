"""Accounting by Gaussian differential privacy."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

from opacus.accountants.accountant import IAccountant, reject_unknown_arguments
from opacus.accountants.history import check_delta, check_noise_multiplier, check_sample_rate, merge


class GaussianAccountant(IAccountant):
    """Approximates the cost of many equal steps by a central limit theorem (arXiv 1911.11607).

    This is an approximation, not a bound: it can report less than the true cost. All steps must
    have the same noise multiplier and sample rate.

    Warns:
        UserWarning: when created.
    """

    counts_one_rate: ClassVar[bool] = True

    def __init__(self) -> None:
        warnings.warn(
            "The GDP accountant approximates: it can report less privacy loss than there is "
            "(https://arxiv.org/abs/2106.02848). Use 'prv' or 'rdp' for a bound.",
            stacklevel=2,
        )
        super().__init__()

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one optimizer step.

        Args:
            noise_multiplier: standard deviation of the noise divided by the sensitivity.
            sample_rate: probability of one sample being in the logical batch, in [0, 1].

        Raises:
            ValueError: if either differs from the steps before, or is out of range; the history
                is unchanged then.
        """
        key = (check_noise_multiplier(noise_multiplier), check_sample_rate(sample_rate))
        _check_constant({tuple(entry[:2]) for entry in self.history} | {key})
        super().step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    def get_epsilon(self, delta: float, poisson: bool = True, **kwargs: Any) -> float:
        """Returns the approximate epsilon of all recorded steps at `delta`.

        Args:
            delta: strictly between 0 and 1.
            poisson: True for Poisson sampling, False for batches of fixed size.
            **kwargs: none is known; any raises TypeError.

        Raises:
            ValueError: if the history (for example an assigned one) is not constant.
        """
        from opacus.accountants.analysis import gdp as analysis

        reject_unknown_arguments("GaussianAccountant.get_epsilon", kwargs)
        delta = check_delta(delta)
        counts = merge(self.history)
        if not counts:
            return 0.0
        _check_constant(set(counts))
        (noise_multiplier, sample_rate), steps = next(iter(counts.items()))
        compute = analysis.compute_eps_poisson if poisson else analysis.compute_eps_uniform
        return compute(
            steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate, delta=delta
        )

    @classmethod
    def mechanism(cls) -> str:
        return "gdp"


def _check_constant(keys: set[tuple[Any, ...]]) -> None:
    """Raises unless there is at most one (noise multiplier, sample rate)."""
    if len(keys) > 1:
        raise ValueError(
            "the GDP accountant needs a constant noise_multiplier and sample_rate, got "
            f"{sorted(keys)}; use the accountant 'prv' or 'rdp' for a schedule"
        )
