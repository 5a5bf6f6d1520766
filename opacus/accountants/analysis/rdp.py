r"""Renyi differential privacy of the Poisson-sampled Gaussian mechanism.

With sample rate q and noise multiplier s, the worst pair of neighbouring outputs is
P = (1 - q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2), and the divergence of order a is
log(A) / (a - 1) with

    A = E_{z ~ Q} [(P(z) / Q(z))^a]                     (Mironov, Talwar, Zhang, arXiv 1908.10530)

for whole and for fractional a alike. The integrand is analytic and falls off like a Gaussian, so
the trapezoid rule converges exponentially in the step: all orders share one array of nodes,
instead of one slowly converging series each.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from opacus.accountants.history import (
    check_delta,
    check_noise_multiplier,
    check_sample_rate,
    check_steps,
)

# Fine where the best order of usual runs lies.
DEFAULT_ORDERS = (*(1 + x / 10.0 for x in range(1, 100)), *range(12, 64))

# The integrand is a mixture of Gaussians of width s: it is below e^-98 of a peak 14 s away.
_REACH = 14.0
# Nodes per unit of min(s, s^2). The next poles of log(P / Q) are pi s^2 off the real axis, so the
# error of the trapezoid rule is below e^(-2 pi^2 * 2.5), about 1e-21.
_NODES_PER_UNIT = 2.5
# For small s, P / Q bends far from both peaks, so steps finer than 0.05 s gain nothing.
_FINEST = 0.05
# The log of a moment is at least 0 and rounds by a few units of the last place of 1; over ten
# million steps that adds 1e-8 to epsilon, which is counted.
_ROUNDING = 16 * np.finfo(np.float64).eps
# Below this noise 1 / s^2 overflows; there is no privacy then.
_NO_NOISE = 1e-100


def _log_integral(q: float, sigma: float, orders: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Returns log of the sum over `nodes` of Q(z) (P(z) / Q(z))^a, without the weight of a node.

    Args:
        q: sample rate, in (0, 1).
        sigma: noise multiplier.
        orders: `[A]`.
        nodes: `[N]` if shared by all orders, or `[A, N]`.

    Returns:
        `[A]`.
    """
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (nodes - 0.5) / sigma**2)
    exponent = orders[:, None] * log_ratio - 0.5 * (nodes / sigma) ** 2
    peak = exponent.max(axis=1)
    log_sum: np.ndarray = peak + np.log(np.exp(exponent - peak[:, None]).sum(axis=1))
    return log_sum


def _log_moment(q: float, sigma: float, orders: np.ndarray) -> np.ndarray:
    """Returns log(A) for every order, `[A]`; q lies in (0, 1) and sigma is above `_NO_NOISE`."""
    spacing = sigma * max(min(sigma, 1.0), _FINEST) / _NODES_PER_UNIT
    # Expanding (P / Q)^a gives Gaussians at k = 0..a. If a is large against `half` those in the
    # middle vanish against the ends, and two short windows replace one long one.
    half = _REACH * sigma + 2.0 * sigma**2
    far = orders > 2.0 * half
    log_sum = np.empty_like(orders)
    if not far.all():
        top = orders[~far].max() + _REACH * sigma
        nodes = np.arange(-_REACH * sigma, top + spacing, spacing)
        log_sum[~far] = _log_integral(q, sigma, orders[~far], nodes)
    if far.any():
        window = np.arange(-half, half + spacing, spacing)
        at_zero = np.broadcast_to(window, (int(far.sum()), window.size))
        nodes = np.concatenate([at_zero, at_zero + orders[far, None]], axis=1)
        log_sum[far] = _log_integral(q, sigma, orders[far], nodes)
    return log_sum + math.log(spacing / (sigma * math.sqrt(2.0 * math.pi)))


@functools.lru_cache(maxsize=4096)
def _rdp_of_one_step(q: float, sigma: float, orders: tuple[float, ...]) -> np.ndarray:
    """Returns the divergences of one step, `[A]`, read-only because it is cached."""
    alphas = np.array(orders, dtype=np.float64)
    rdp = np.full(alphas.shape, math.inf)
    finite = np.isfinite(alphas)
    if q == 0.0:
        rdp[:] = 0.0
    elif sigma >= _NO_NOISE and q == 1.0:
        rdp[finite] = alphas[finite] / (2.0 * sigma**2)
    elif sigma >= _NO_NOISE and finite.any():
        log_moment = _log_moment(q, sigma, alphas[finite])
        rdp[finite] = (np.maximum(log_moment, 0.0) + _ROUNDING) / (alphas[finite] - 1.0)
    rdp.flags.writeable = False
    return rdp


def compute_rdp(
    *, q: float, noise_multiplier: float, steps: int, orders: ArrayLike
) -> np.ndarray | float:
    """Returns the Renyi divergence of `steps` Poisson-sampled Gaussian steps (arXiv 1908.10530).

    Args:
        q: sample rate, in [0, 1].
        noise_multiplier: standard deviation of the noise divided by the sensitivity; 0 gives
            infinity.
        steps: number of steps, at least 0.
        orders: one order or a list of them, each above 1; infinity is allowed.

    Returns:
        A float for one order, else an array, `[len(orders)]`, float64.

    Raises:
        TypeError, ValueError: if an argument is outside its range.
    """
    rate, sigma = check_sample_rate(q), check_noise_multiplier(noise_multiplier)
    count = check_steps(steps)
    alphas = np.asarray(orders, dtype=np.float64)
    if not (alphas > 1.0).all():
        raise ValueError(f"orders must all be above 1, got {orders!r}")
    if count == 0:
        rdp = np.zeros(alphas.size)
    else:
        rdp = count * _rdp_of_one_step(rate, sigma, tuple(alphas.ravel().tolist()))
    return float(rdp[0]) if alphas.ndim == 0 else rdp


def total_rdp(counts: Mapping[tuple[float, float], int], orders: np.ndarray) -> np.ndarray:
    """Returns the divergence of a whole history at each order, `[A]`.

    Args:
        counts: steps of each (noise multiplier, sample rate).
        orders: `[A]`, each above 1.
    """
    total = np.zeros(orders.shape)
    for (sigma, rate), steps in counts.items():
        total += compute_rdp(q=rate, noise_multiplier=sigma, steps=steps, orders=orders)
    return total


def smallest_epsilon(orders: np.ndarray, rdp: np.ndarray, delta: float) -> tuple[float, int]:
    """Returns the best epsilon over the orders and its index, without checks and warnings.

    The bound for one order is Proposition 12 of arXiv 2004.00010 (theorem 21 of arXiv 1905.09982).

    Args:
        orders: `[A]`, each above 1.
        rdp: `[A]`; NaN entries are left out.
        delta: strictly between 0 and 1.

    Returns:
        (epsilon, index); epsilon is at least 0, and infinite (index 0) if no order helps.
    """
    slack = (math.log(delta) + np.log(orders)) / (orders - 1.0)
    epsilons = rdp - slack + np.log1p(-1.0 / orders)
    best = int(np.argmin(np.where(np.isnan(epsilons), math.inf, epsilons)))
    epsilon = float(epsilons[best])
    return (math.inf if math.isnan(epsilon) else max(0.0, epsilon)), best


def get_privacy_spent(*, orders: ArrayLike, rdp: ArrayLike, delta: float) -> tuple[float, float]:
    """Converts Renyi divergences to the smallest epsilon that they prove at `delta`.

    Args:
        orders: one order or a list of them, each finite and above 1.
        rdp: the divergence at each order; those that are NaN are left out.
        delta: strictly between 0 and 1.

    Returns:
        (epsilon, order that gives it); epsilon is at least 0, and infinite if no order helps.

    Raises:
        ValueError: if the lengths differ or an argument is outside its range.

    Warns:
        UserWarning: if the best order is the first or last one, and so others may be better.
    """
    delta = check_delta(delta)
    alphas, divergences = np.atleast_1d(orders).astype(float), np.atleast_1d(rdp).astype(float)
    if alphas.shape != divergences.shape:
        raise ValueError(
            f"orders and rdp must have the same length, got {alphas.size} and {divergences.size}"
        )
    if not ((alphas > 1.0) & np.isfinite(alphas)).all():
        raise ValueError(f"orders must all be finite and above 1, got {orders!r}")
    epsilon, best = smallest_epsilon(alphas, divergences, delta)
    if alphas.size > 1 and 0.0 < epsilon < math.inf and best in (0, alphas.size - 1):
        end = "smallest" if best == 0 else "largest"
        warnings.warn(
            f"The {end} Renyi order, {alphas[best]:g}, gave the best epsilon, {epsilon:.4g}: a "
            f"wider range of alphas may give a smaller one.",
            stacklevel=2,
        )
    return epsilon, float(alphas[best])
