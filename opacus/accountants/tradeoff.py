"""What an accountant's history lets an attacker do: trade-off curves, and mu of Gaussian DP.

Every pair (epsilon, delta) that an accountant proves bounds the true positive rate of any test of
"was this unit in the data?" at a false positive rate a (arXiv 1905.02383, proposition 3):
``min(delta + e^epsilon a, 1 - e^-epsilon (1 - delta - a))``. The functions take the best of many
deltas, so they hold if the accountant's epsilon does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from opacus.accountants.accountant import IAccountant
from opacus.accountants.history import check_delta

_LARGEST_DELTA = 0.999


def privacy_profile(
    accountant: IAccountant, *, least_delta: float = 1e-9, points: int = 60
) -> tuple[np.ndarray, np.ndarray]:
    """Returns deltas and the epsilon of each.

    Args:
        accountant: with a history; "pld" is fast and tight.
        least_delta: the smallest delta, in (0, 0.1); small false positive rates need a smaller one.
        points: number of deltas, at least 2.

    Returns:
        (deltas, increasing, `[points]`; epsilons, `[points]`).
    """
    if not 0.0 < check_delta(least_delta) < 0.1:
        raise ValueError(f"least_delta must be below 0.1, got {least_delta!r}")
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points!r}")
    few = max(2, points // 3)  # evenly spaced ones matter for the middle of the curve
    deltas = np.unique(
        np.concatenate(
            [
                np.geomspace(least_delta, 0.1, points - few + 1)[:-1],
                np.linspace(0.1, _LARGEST_DELTA, few),
            ]
        )
    )
    return deltas, np.array([accountant.get_epsilon(float(delta)) for delta in deltas])


def max_true_positive_rate(
    accountant: IAccountant, fpr: float | Sequence[float], **profile: float
) -> np.ndarray:
    """Returns the most that any attacker's true positive rate can be, `[len(fpr)]`.

    Args:
        accountant: with a history.
        fpr: false positive rates, each in [0, 1].
        **profile: arguments of `privacy_profile`.
    """
    rates = np.atleast_1d(np.asarray(fpr, dtype=np.float64))
    if not ((rates >= 0.0) & (rates <= 1.0)).all():
        raise ValueError(f"fpr must be between 0 and 1, got {fpr!r}")
    deltas, epsilons = privacy_profile(accountant, **profile)  # type: ignore[arg-type]
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.exp(epsilons)[:, None] * rates  # [deltas, rates]
    low = deltas[:, None] + np.where(rates == 0.0, 0.0, grown)
    high = 1.0 - np.exp(-epsilons)[:, None] * (1.0 - deltas[:, None] - rates)
    return np.minimum(np.minimum(low, high).min(axis=0), 1.0)


def tradeoff_curve(
    accountant: IAccountant, fpr: float | Sequence[float], **profile: float
) -> np.ndarray:
    """Returns the least false negative rate at each false positive rate (f-DP), `[len(fpr)]`."""
    return 1.0 - max_true_positive_rate(accountant, fpr, **profile)


def gaussian_mu(accountant: IAccountant, *, least_delta: float = 1e-9, points: int = 120) -> float:
    """Returns a mu such that the history is no worse than mu-Gaussian DP, down to `least_delta`.

    That is, for every delta of at least `least_delta`, epsilon is at most that of one Gaussian
    mechanism whose means are mu standard deviations apart. Between the deltas that are tried,
    epsilon is taken at the smaller one and the Gaussian's at the larger one.

    Args:
        accountant: with a history.
        least_delta: the smallest delta that is compared, in (0, 0.1).
        points: number of deltas; with more of them mu gets closer to the best one.
    """
    from opacus.accountants.analysis.gdp import delta_eps_mu

    deltas, epsilons = privacy_profile(accountant, least_delta=least_delta, points=points)
    if not np.isfinite(epsilons).all():
        return math.inf
    largest = 0.0
    uppers = np.append(deltas[1:], 1.0 - 1e-12)
    for epsilon, delta in zip(epsilons, uppers, strict=True):
        if epsilon == 0.0:  # the rest of the profile is 0, this stretch included
            break
        low, high = largest, max(1.0, largest)
        while delta_eps_mu(eps=epsilon, mu=high) < delta:
            low, high = high, 2.0 * high
        while high - low > 1e-9 * high:
            middle = 0.5 * (low + high)
            if delta_eps_mu(eps=epsilon, mu=middle) < delta:
                low = middle
            else:
                high = middle
        largest = high
    # Where epsilon is 0, delta is the total variation distance, at most the last one tried.
    zero = deltas[epsilons == 0.0]
    if zero.size:
        from scipy.special import ndtri  # type: ignore[import-untyped]

        largest = max(largest, 2.0 * float(ndtri(0.5 + 0.5 * zero[0])))
    return largest
