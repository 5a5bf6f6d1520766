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
# Pieces of the profile between two deltas.
_STRETCH = 16
# Number of halvings that locate the total variation distance between two deltas.
_HALVINGS = 10


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
    """Returns the least false negative rate at each false positive rate (f-DP), `[len(fpr)]`.

    Arguments are those of `max_true_positive_rate`.
    """
    return 1.0 - max_true_positive_rate(accountant, fpr, **profile)


def gaussian_mu(accountant: IAccountant, *, least_delta: float = 1e-9, points: int = 60) -> float:
    """Returns a mu such that the history is no worse than mu-Gaussian DP, down to `least_delta`.

    That is, for every delta of at least `least_delta`, epsilon is at most that of one Gaussian
    mechanism whose means are mu standard deviations apart. Infinity if no mu is found.

    Args:
        accountant: with a history.
        least_delta: the smallest delta that is compared, in (0, 0.1).
        points: number of deltas; with more of them mu gets closer to the best one.
    """
    deltas, epsilons = privacy_profile(accountant, least_delta=least_delta, points=points)
    if epsilons[-1] > 0.0:
        deltas = np.append(deltas, 1.0 - 1e-9)
        epsilons = np.append(epsilons, accountant.get_epsilon(1.0 - 1e-9))
    if epsilons[-1] > 0.0 or not np.isfinite(epsilons).all():
        return math.inf
    deltas, epsilons = _with_distance(accountant, deltas, epsilons)
    largest = 0.0
    for i in np.flatnonzero(epsilons[:-1] > 0.0):
        # As a function of e^epsilon, delta is convex: it lies below the chord between two points.
        part = np.linspace(0.0, 1.0, _STRETCH + 1)
        between = epsilons[i] + np.log1p(part * math.expm1(epsilons[i + 1] - epsilons[i]))
        chord = deltas[i] + part * (deltas[i + 1] - deltas[i])
        # Of each piece of the chord, the larger delta at the larger epsilon.
        for epsilon, delta in zip(between[:-1], chord[1:], strict=True):
            largest = _raise_mu(largest, float(epsilon), float(delta))
    return largest


def _with_distance(
    accountant: IAccountant, deltas: np.ndarray, epsilons: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the profile up to the total variation distance, the first delta with epsilon 0."""
    spent = int(np.count_nonzero(epsilons > 0.0))
    if spent == 0:
        return deltas, epsilons
    deltas, epsilons = deltas[: spent + 1].copy(), epsilons[: spent + 1].copy()
    low = float(deltas[spent - 1])
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + float(deltas[spent]))
        if accountant.get_epsilon(middle) > 0.0:
            low = middle
        else:
            deltas[spent] = middle
    return deltas, epsilons


def _raise_mu(mu: float, epsilon: float, delta: float) -> float:
    """Returns the smallest mu, at least the given one, whose delta at `epsilon` is `delta`."""
    from opacus.accountants.analysis.gdp import delta_eps_mu

    if mu > 0.0 and delta_eps_mu(eps=epsilon, mu=mu) >= delta:
        return mu
    low, high = mu, max(1.0, 2.0 * mu)
    while delta_eps_mu(eps=epsilon, mu=high) < delta:
        low, high = high, 2.0 * high
    while high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        if middle > 0.0 and delta_eps_mu(eps=epsilon, mu=middle) >= delta:
            high = middle
        else:
            low = middle
    return high
