"""The dominating pairs of one step, for every way to draw its batch.

In units of the noise, a unit that is absent gives N(0, 1). Neighbours differ by one unit; each
function returns the step for adding it and the one for removing it, as their losses differ.
"""

from __future__ import annotations

import math

from scipy.special import betainc, gammaln, xlog1py, xlogy  # type: ignore[import-untyped]

from opacus.accountants.analysis.pld.compose import Step
from opacus.accountants.analysis.pld.pairs import Mixture, Pair
from opacus.accountants.history import Mechanism
from opacus.accountants.sampling import (
    FixedSize,
    GaussianMixture,
    TruncatedPoisson,
    UserRows,
)

_NOTHING = Mixture((0.0,), (1.0,))


def full_batch(mu: float) -> tuple[Step, Step]:
    """Returns the steps of one Gaussian mechanism with means `mu` standard deviations apart."""
    return _both([(1.0, [(mu, 1.0)])], 1)


def steps_of(mechanism: Mechanism, count: int) -> tuple[Step, Step]:
    """Returns the steps of adding and of removing a unit, `count` times."""
    sigma, rate, sampling = mechanism
    if sampling is None:
        return _both([(1.0, [(1.0 / sigma, rate)])], count)
    if isinstance(sampling, FixedSize):
        # Whoever is drawn takes another's place: mixtures a distance of 2 apart (arXiv
        # 2408.10456; advanced joint convexity, arXiv 1807.01647).
        return _both([(1.0, [(2.0 / sigma, rate)])], count)
    if isinstance(sampling, TruncatedPoisson):
        return _truncated(sigma, rate, sampling, count)
    if isinstance(sampling, UserRows):
        # j of the user's rows are drawn with a binomial probability (arXiv 2407.07737).
        drawn = range(1, sampling.rows + 1)
        moves = [(j / sigma, _exactly(j, sampling.rows, rate)) for j in drawn]
        return _both([(1.0, moves)], count)
    if isinstance(sampling, GaussianMixture):
        pairs = zip(sampling.sensitivities, sampling.probabilities, strict=True)
        return _both([(1.0, [(s / sigma, p) for s, p in pairs])], count)
    raise TypeError(f"no dominating pair is known for {sampling!r}")


def _truncated(
    sigma: float, rate: float, sampling: TruncatedPoisson, count: int
) -> tuple[Step, Step]:
    """Returns the steps of truncated Poisson sampling (arXiv 2508.15089).

    If the others alone fill the batch, the unit can only take another's place, a move of 2, and
    is drawn with the probability `instead`; if they do not, nothing is truncated for either.
    """
    others, most = sampling.dataset_size - 1, sampling.max_batch_size
    full = _more_than(most - 1, others, rate)
    plain = [(1.0 / sigma, rate)]
    if full <= 0.0:
        return _both([(1.0, plain)], count)
    overfull = _more_than(most, sampling.dataset_size, rate)
    instead = min(overfull / full * most / sampling.dataset_size, rate)
    return _both([(1.0 - full, plain), (full, [(2.0 / sigma, instead)])], count)


# Of scipy.stats, which takes a second to import, this would be `binom`.
def _exactly(drawn: int, of: int, rate: float) -> float:
    """Returns the binomial probability of so many."""
    ways = gammaln(of + 1) - gammaln(drawn + 1) - gammaln(of - drawn + 1)
    return math.exp(ways + xlogy(drawn, rate) + xlog1py(of - drawn, -rate))


def _more_than(drawn: int, of: int, rate: float) -> float:
    """Returns the binomial probability of more than so many."""
    return float(betainc(drawn + 1, of - drawn, rate)) if drawn < of else 0.0


def _both(cases: list[tuple[float, list[tuple[float, float]]]], count: int) -> tuple[Step, Step]:
    """Returns the steps of adding and of removing.

    Args:
        cases: (probability of the case, moves); moves are (distance, probability) of the unit,
            and what is missing of probability 1 moves nothing.
        count: number of steps.
    """
    weights, adding, removing = [], [], []
    for weight, moves in cases:
        if weight <= 0.0:
            continue
        rest = max(0.0, 1.0 - sum(p for _, p in moves))
        kept = [(distance, p) for distance, p in moves if p > 0.0] + [(0.0, rest)] * (rest > 0.0)
        distances, probabilities = zip(*kept, strict=True)
        weights.append(weight)
        removing.append(Pair(Mixture(distances, probabilities), _NOTHING))
        # The loss of the reverse pair grows as z falls; mirrored, it grows with z.
        mirrored = Mixture(tuple(-distance for distance in distances), probabilities)
        adding.append(Pair(_NOTHING, mirrored))
    return (
        Step(tuple(adding), tuple(weights), count),
        Step(tuple(removing), tuple(weights), count),
    )
