"""Accounting by numerical composition of privacy loss random variables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from opacus.accountants.accountant import IAccountant, reject_unknown_arguments
from opacus.accountants.analysis.rdp_orders import best_order
from opacus.accountants.history import check_delta, merge
from opacus.accountants.pld import composed_loss

if TYPE_CHECKING:
    from opacus.accountants.analysis.prv import Domain, PoissonSubsampledGaussianPRV

Counts = dict[tuple[float, float], int]

# Largest grid, and the most points that are transformed in all: a few seconds of work.
_MOST_POINTS = 2**24
_MOST_WORK = 2**29
# Above this number of points, and with few mechanisms, `PLDAccountant` is faster.
_LARGE = 2**20
_FEW_DISTINCT = 8
# Most distinct mechanisms that are composed as they are; a schedule with more is coarsened.
_MOST_DISTINCT = 1024


class PRVAccountant(IAccountant):
    """Composes the distribution of the privacy loss itself (arXiv 2106.02848).

    The value is a proven upper bound, up to floating point rounding, for Poisson-sampled Gaussian
    steps whose noise and rate may change, and for a sample that is added as for one that is
    removed. It exceeds the true epsilon by about `eps_error`, and never exceeds that of
    `RDPAccountant`, which it takes where it is smaller. Where the grid would pass a million points,
    as after some 20,000 steps, it takes the value of `PLDAccountant`.
    """

    def get_epsilon(
        self,
        delta: float,
        *,
        eps_error: float = 0.01,
        delta_error: float | None = None,
        **kwargs: Any,
    ) -> float:
        """Returns an epsilon for which all recorded steps together are (epsilon, delta)-DP.

        Args:
            delta: strictly between 0 and 1.
            eps_error: what the result may exceed the true epsilon by, above 0; it is part of the
                result, so take a smaller one to resolve an epsilon near it.
            delta_error: the part of `delta` spent on truncation, above 0 and below `delta`;
                ``delta / 1000`` if None.
            **kwargs: none is known; any raises TypeError.

        Raises:
            ValueError: if an argument is out of its range.
        """
        reject_unknown_arguments("PRVAccountant.get_epsilon", kwargs)
        delta = check_delta(delta)
        delta_error = delta / 1000.0 if delta_error is None else delta_error
        if not 0.0 < eps_error < math.inf:
            raise ValueError(f"eps_error must be finite and above 0, got {eps_error!r}")
        if not 0.0 < delta_error < delta:
            raise ValueError(f"delta_error must be above 0 and below delta, got {delta_error!r}")
        counts = merge(self.history)
        if not counts:
            return 0.0
        if any(noise_multiplier == 0.0 for noise_multiplier, _ in counts):
            return math.inf
        composed = _prv_epsilon(_coarsen(counts, _MOST_DISTINCT), delta, eps_error, delta_error)
        return max(0.0, min(composed, best_order(counts, delta)[0]))

    @classmethod
    def mechanism(cls) -> str:
        return "prv"


def _coarsen(counts: Counts, most: int) -> Counts:
    """Merges neighbouring noise multipliers until about `most` distinct mechanisms are left.

    A merged group takes the smallest noise multiplier among its members. More noise is the same
    step followed by adding the rest of it, so the result bounds the cost from above. All groups
    are equally wide on a log scale: below 0.5% if the noise changes a hundredfold.
    """
    if len(counts) <= most:
        return counts
    by_rate: dict[float, list[float]] = {}
    for sigma, sample_rate in counts:
        by_rate.setdefault(sample_rate, []).append(sigma)
    width = sum(math.log(max(sigmas) / min(sigmas)) for sigmas in by_rate.values()) / most
    merged: Counts = {}
    for sample_rate, sigmas in by_rate.items():
        sigmas.sort()
        smallest = sigmas[0]
        for sigma in sigmas:
            if math.log(sigma / smallest) > width:
                smallest = sigma
            key = (smallest, sample_rate)
            merged[key] = merged.get(key, 0) + counts[(sigma, sample_rate)]
    return merged


def _prv_epsilon(counts: Counts, delta: float, eps_error: float, delta_error: float) -> float:
    """Returns the upper bound of the composed privacy loss; infinity if no grid can resolve it."""
    from opacus.accountants.analysis.prv import (
        AddedSampleGaussianPRV,
        PoissonSubsampledGaussianPRV,
        TruncatedPrivacyRandomVariable,
        compose_heterogeneous,
        discretize,
    )

    prvs: list[PoissonSubsampledGaussianPRV]
    prvs = [PoissonSubsampledGaussianPRV(rate, sigma) for sigma, rate in counts]
    steps = list(counts.values())
    grid = _choose_grid(prvs, steps, eps_error, delta_error)
    if grid is None:
        return math.inf
    domain, eps_error = grid
    few = len(counts) <= _FEW_DISTINCT
    if few and domain.size > _LARGE:
        return _pld_epsilon(counts, delta)
    directions = [prvs]  # of full batches both are the same
    if any(rate < 1.0 for _, rate in counts):
        directions.append([AddedSampleGaussianPRV(rate, sigma) for sigma, rate in counts])
    largest = -math.inf
    for direction in directions:
        losses = (
            discretize(TruncatedPrivacyRandomVariable(prv, domain.t_min, domain.t_max), domain)
            for prv in direction
        )
        composed = compose_heterogeneous(losses, steps)
        try:
            largest = max(largest, composed.compute_epsilon(delta, delta_error, eps_error)[2])
        except ValueError:  # so small a delta drowns in rounding
            return _pld_epsilon(counts, delta) if few else math.inf
    return largest


def _pld_epsilon(counts: Counts, delta: float) -> float:
    """Returns the composed bound of `PLDAccountant`, whose grid does not grow with `eps_error`."""
    return composed_loss({(sigma, rate, None): n for (sigma, rate), n in counts.items()}, delta)


def _choose_grid(
    prvs: list[PoissonSubsampledGaussianPRV],
    steps: list[int],
    eps_error: float,
    delta_error: float,
) -> tuple[Domain, float] | None:
    """Returns the grid and the error in epsilon that it guarantees.

    Rounding T steps to spacing dt errs by at most dt sqrt(T / 2 log(12 / delta_error)), except
    with a probability that `delta_error` pays for (theorem 5.5 of arXiv 2106.02848, by Hoeffding).
    That holds for any spacing, so too large a grid is made coarser and its error reported.
    """
    from scipy.fft import next_fast_len  # type: ignore[import-untyped]

    from opacus.accountants.analysis.prv.domain import (
        MARGIN,
        Domain,
        compute_safe_domain_size,
    )

    high = compute_safe_domain_size(prvs, steps, eps_error, delta_error)
    if not math.isfinite(high):
        return None
    # P(Y < -x) <= e^-x for every privacy loss Y, by P = e^Y Q: large domains need no lower half.
    low = min(high, math.log(8.0 * sum(steps) / delta_error) + MARGIN)
    growth = math.sqrt(sum(steps) / 2.0 * math.log(12.0 / delta_error))
    most_points = min(_MOST_POINTS, _MOST_WORK // len(prvs))
    spacing = max(eps_error / growth, (low + high) / most_points)
    below, above = math.ceil(low / spacing), math.ceil(high / spacing)
    size = 2 * next_fast_len(math.ceil((below + above + 1) / 2), real=True)
    domain = Domain(-below * spacing, (size - 1 - below) * spacing, size)
    return domain, spacing * growth
