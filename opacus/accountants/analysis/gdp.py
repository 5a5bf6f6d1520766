"""Gaussian differential privacy: the central limit approximation of composition.

Many steps together behave like one Gaussian mechanism whose means are mu standard deviations
apart (arXiv 1905.02383; mu for stochastic gradient descent: arXiv 1911.11607). This is a limit,
not a bound: for finitely many steps it can be lower than the true cost (arXiv 2106.02848).
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr  # type: ignore[import-untyped]

from opacus.accountants.history import (
    check_delta,
    check_noise_multiplier,
    check_sample_rate,
    check_steps,
)

# Below this noise mu exceeds 1e130 and mu^2 overflows: infinity is returned, there is no privacy.
_LEAST_NOISE = 0.04


def compute_mu_uniform(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Returns mu for batches of fixed size drawn uniformly (theorem 4 of arXiv 1911.11607).

    Args:
        steps: number of steps.
        noise_multiplier: standard deviation of the noise divided by the sensitivity.
        sample_rate: batch size divided by dataset size.
    """
    rate, sigma = check_sample_rate(sample_rate), check_noise_multiplier(noise_multiplier)
    scale = rate * math.sqrt(check_steps(steps))
    if scale == 0.0 or sigma < _LEAST_NOISE:
        return 0.0 if scale == 0.0 else math.inf
    growth = math.exp(sigma**-2) * _normal_cdf(1.5 / sigma) + 3.0 * _normal_cdf(-0.5 / sigma) - 2.0
    return math.sqrt(2.0) * scale * math.sqrt(max(growth, 0.0))


def compute_mu_poisson(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Returns mu for Poisson-sampled batches: q sqrt(T (e^(1 / sigma^2) - 1)), arXiv 1911.11607.

    Args:
        steps: number of steps, T.
        noise_multiplier: standard deviation of the noise divided by the sensitivity, sigma.
        sample_rate: probability of one sample being in a batch, q.
    """
    rate, sigma = check_sample_rate(sample_rate), check_noise_multiplier(noise_multiplier)
    scale = rate * math.sqrt(check_steps(steps))
    if scale == 0.0 or sigma < _LEAST_NOISE:
        return 0.0 if scale == 0.0 else math.inf
    return scale * math.sqrt(math.expm1(sigma**-2))


def _normal_cdf(x: float) -> float:
    return math.exp(log_ndtr(x))


def delta_eps_mu(*, eps: float, mu: float) -> float:
    """Returns delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), arXiv 1905.02383 (6).

    Args:
        eps: any finite number.
        mu: at least 0; 0 means that the outputs do not depend on the data.
    """
    if math.isnan(mu) or mu < 0.0:
        raise ValueError(f"mu must be at least 0, got {mu!r}")
    if mu == 0.0 or mu == math.inf:
        return max(0.0, -math.expm1(eps)) if mu == 0.0 else 1.0
    first = float(log_ndtr(mu / 2.0 - eps / mu))
    second = eps + float(log_ndtr(-mu / 2.0 - eps / mu))
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def eps_from_mu(*, mu: float, delta: float) -> float:
    """Returns the smallest eps of at least 0 with ``delta_eps_mu(eps, mu) <= delta``.

    Args:
        mu: at least 0; infinity gives infinity.
        delta: strictly between 0 and 1.
    """
    delta = check_delta(delta)
    if delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    if mu == math.inf:
        return math.inf
    low, high = 0.0, 1.0
    while delta_eps_mu(eps=high, mu=mu) > delta:
        low, high = high, 2.0 * high
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if delta_eps_mu(eps=middle, mu=mu) > delta:
            low = middle
        else:
            high = middle
    return high


def compute_eps_uniform(
    *, steps: int, noise_multiplier: float, sample_rate: float, delta: float
) -> float:
    """Returns epsilon of `compute_mu_uniform` at `delta`."""
    mu = compute_mu_uniform(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return eps_from_mu(mu=mu, delta=delta)


def compute_eps_poisson(
    *, steps: int, noise_multiplier: float, sample_rate: float, delta: float
) -> float:
    """Returns epsilon of `compute_mu_poisson` at `delta`."""
    mu = compute_mu_poisson(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return eps_from_mu(mu=mu, delta=delta)
