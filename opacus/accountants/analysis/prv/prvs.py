"""Privacy loss random variables: continuous, truncated and on a grid (arXiv 2106.02848).

For a pair of output distributions (P, Q) the privacy loss is Y = log(P(z) / Q(z)) with z drawn
from P, and delta(eps) = E[max(0, 1 - e^(eps - Y))].
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from scipy.special import ndtr  # type: ignore[import-untyped]

from opacus.accountants.analysis.prv.domain import Domain
from opacus.accountants.analysis.rdp import compute_rdp
from opacus.accountants.history import check_noise_multiplier, check_sample_rate

SQRT2 = math.sqrt(2.0)

# Beyond this many standard deviations a Gaussian's mass is 1e-32: negligible even over 1e12 steps
# at the smallest delta.
_REACH = 12.0
# Gauss-Legendre rule for one panel, and the smallest panel in units of s: with little noise the
# loss bends far from where the outputs are.
_PANEL_NODES = 16
_FINEST_PANEL = 0.02
# A loss this far above epsilon counts fully: e^-40 is below rounding.
_DECAYED = 40.0
# Probability below the first kept cell of a discretised loss.
_NEGLIGIBLE = 1e-24


class _PRV(Protocol):
    """The interface of a privacy loss random variable that truncation uses."""

    def pdf(self, t: Any) -> Any: ...

    def cdf(self, t: Any) -> Any: ...

    def partial_mean(self, t_min: float, t_max: float) -> float: ...


class PoissonSubsampledGaussianPRV:
    """Privacy loss of one Poisson-sampled Gaussian step, for a sample that is removed.

    P = (1 - q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2), with sample rate q and noise multiplier
    s. Its losses lie above log(1 - q).
    """

    def __init__(self, sample_rate: float, noise_multiplier: float) -> None:
        self.sample_rate = check_sample_rate(sample_rate)
        self.noise_multiplier = check_noise_multiplier(noise_multiplier)
        if self.sample_rate == 0.0 or self.noise_multiplier == 0.0:
            raise ValueError(
                "a privacy loss random variable needs sample_rate and noise_multiplier above 0, "
                f"got {sample_rate!r} and {noise_multiplier!r}"
            )
        self._log_q = math.log(self.sample_rate)
        self._lowest = math.log1p(-self.sample_rate) if self.sample_rate < 1.0 else -math.inf

    def _loss(self, z: np.ndarray) -> np.ndarray:
        """Returns log(P(z) / Q(z))."""
        return np.logaddexp(self._lowest, self._log_q + (z - 0.5) / self.noise_multiplier**2)

    def _output(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns z with loss t, and dz/dt; -inf and 0 where t is below every loss."""
        below = t <= self._lowest
        gap = np.where(below, -1.0, self._lowest - t)  # log((1 - q) e^-t), below 0
        kept = -np.expm1(gap)  # 1 - (1 - q) e^-t
        variance = self.noise_multiplier**2
        z = variance * (t - self._log_q + np.log(kept)) + 0.5
        return np.where(below, -math.inf, z), np.where(below, 0.0, variance / kept)

    def _mix(self, function: Any, z: Any) -> Any:
        """Returns (1 - q) f(z / s) + q f((z - 1) / s)."""
        q, s = self.sample_rate, self.noise_multiplier
        return (1.0 - q) * function(z / s) + q * function((z - 1.0) / s)

    def _density(self, z: Any) -> Any:
        """Returns P(z)."""
        scale = self.noise_multiplier * math.sqrt(2.0 * math.pi)
        return self._mix(lambda x: np.exp(-0.5 * x * x), z) / scale

    def pdf(self, t: Any) -> Any:
        """Returns the density at losses `t`, of the same shape."""
        z, slope = self._output(np.asarray(t, dtype=np.float64))
        return self._density(z) * slope

    def cdf(self, t: Any) -> Any:
        """Returns the probability of a loss of at most `t`, of the same shape."""
        z, _ = self._output(np.asarray(t, dtype=np.float64))
        return self._mix(ndtr, z)

    def partial_mean(self, t_min: float, t_max: float) -> float:
        """Returns E[Y; t_min < Y < t_max], integrated over outputs, where all is smooth."""
        ends, _ = self._output(np.array([t_min, t_max], dtype=np.float64))
        reach = _REACH * self.noise_multiplier
        windows = (
            [(-reach, 1.0 + reach)] if reach > 0.5 else [(-reach, reach), (1 - reach, 1 + reach)]
        )
        return sum(self._integrate(*np.clip(window, *ends)) for window in windows)

    def _integrate(self, low: float, high: float) -> float:
        """Returns the integral of loss times density over outputs, by Gauss-Legendre panels."""
        s = self.noise_multiplier
        width = s * min(max(s, _FINEST_PANEL), 1.0)  # the density bends within s, the loss in s^2
        edges = np.linspace(low, high, max(1, math.ceil((high - low) / width)) + 1)
        nodes, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
        half = 0.5 * np.diff(edges)[:, None]
        z = edges[:-1, None] + half * (1.0 + nodes)  # [panels, nodes]
        return float((half * weights * self._loss(z) * self._density(z)).sum())

    def rdp(self, alpha: float) -> float:
        """Returns the Renyi divergence of order `alpha`."""
        return float(
            compute_rdp(
                q=self.sample_rate, noise_multiplier=self.noise_multiplier, steps=1, orders=alpha
            )
        )


class AddedSampleGaussianPRV(PoissonSubsampledGaussianPRV):
    """Privacy loss of the same step for a sample that is added: P and Q have changed places.

    Its losses lie below -log(1 - q), and are those of the other direction with the sign changed,
    of outputs z drawn from N(0, s^2).
    """

    def _mix(self, function: Any, z: Any) -> Any:
        return function(z / self.noise_multiplier)

    def pdf(self, t: Any) -> Any:
        """Returns the density at losses `t`, of the same shape."""
        return super().pdf(-np.asarray(t, dtype=np.float64))

    def cdf(self, t: Any) -> Any:
        """Returns the probability of a loss of at most `t`, of the same shape."""
        z, _ = self._output(-np.asarray(t, dtype=np.float64))
        return self._mix(ndtr, -z)

    def partial_mean(self, t_min: float, t_max: float) -> float:
        """Returns E[Y; t_min < Y < t_max], integrated over outputs, where all is smooth."""
        return -super().partial_mean(-t_max, -t_min)


class TruncatedPrivacyRandomVariable:
    """A privacy loss random variable, given that it lies in [t_min, t_max]."""

    def __init__(self, prv: _PRV, t_min: float, t_max: float) -> None:
        if not t_min < t_max:
            raise ValueError(f"t_min must be below t_max, got {t_min!r} and {t_max!r}")
        self._prv = prv
        self.t_min = t_min
        self.t_max = t_max
        self._below = float(prv.cdf(t_min))
        self._mass = float(prv.cdf(t_max)) - self._below
        if not self._mass > 0.0:
            raise ValueError(f"the loss lies in [{t_min!r}, {t_max!r}] with probability 0")

    def pdf(self, t: Any) -> Any:
        """Returns the density at losses `t`, of the same shape."""
        points = np.asarray(t, dtype=np.float64)
        inside = (points >= self.t_min) & (points <= self.t_max)
        return np.where(inside, self._prv.pdf(points) / self._mass, 0.0)

    def cdf(self, t: Any) -> Any:
        """Returns the probability of a loss of at most `t`, of the same shape."""
        points = np.clip(np.asarray(t, dtype=np.float64), self.t_min, self.t_max)
        return np.clip((self._prv.cdf(points) - self._below) / self._mass, 0.0, 1.0)

    def mean(self) -> float:
        """Returns the expected loss."""
        return self._prv.partial_mean(self.t_min, self.t_max) / self._mass


class DiscretePRV:
    """A privacy loss random variable on a grid.

    Attributes:
        pmf: probabilities, `[domain.size]`.
        domain: where they sit.
    """

    def __init__(self, pmf: np.ndarray, domain: Domain) -> None:
        if len(pmf) != domain.size:
            raise ValueError(
                f"pmf must have one entry per grid point, got {len(pmf)} and {domain.size}"
            )
        self.pmf = pmf
        self.domain = domain

    def __len__(self) -> int:
        return len(self.pmf)

    def compute_epsilon(
        self, delta: float, delta_error: float, eps_error: float
    ) -> tuple[float, float, float]:
        """Returns a lower bound, an estimate and an upper bound of epsilon at `delta`.

        The bounds hold if `pmf` is within (eps_error, delta_error) of the true loss, which is
        what section 5 of arXiv 2106.02848 shows for a suitable grid. They can be negative.

        Args:
            delta: strictly between 0 and 1, and above `delta_error`.
            delta_error: at least 0.
            eps_error: at least 0.

        Raises:
            ValueError: if the grid does not reach high enough for so small a delta.
        """
        if not 0.0 <= delta_error < delta < 1.0:
            raise ValueError(
                f"0 <= delta_error < delta < 1 must hold, got {delta_error!r} and {delta!r}"
            )
        if not eps_error >= 0.0:
            raise ValueError(f"eps_error must be at least 0, got {eps_error!r}")
        pmf = np.maximum(self.pmf, 0.0)  # a Fourier transform leaves rounding of either sign
        tail = np.cumsum(pmf[::-1])[::-1]  # P(Y >= t_i)
        decay = np.exp(-self.domain.dt * np.arange(min(len(pmf), self._points(_DECAYED))))
        lower, estimate, upper = (
            self._epsilon_at(target, pmf, tail, decay)
            for target in (delta + delta_error, delta, delta - delta_error)
        )
        return lower - eps_error, estimate, upper + eps_error

    def _points(self, width: float) -> int:
        """Returns how many grid points cover `width`."""
        return math.ceil(width / self.domain.dt) + 1

    def compute_delta_estimate(self, eps: float) -> float:
        """Returns E[max(0, 1 - e^(eps - Y))]."""
        gap = np.minimum(eps - self.domain.ts, 0.0)
        return float(np.dot(self.pmf, -np.expm1(gap)))

    def _epsilon_at(
        self, delta: float, pmf: np.ndarray, tail: np.ndarray, decay: np.ndarray
    ) -> float:
        """Returns the epsilon at which delta(epsilon) = `delta`.

        Args:
            delta: the target.
            pmf: the probabilities, at least 0, `[size]`.
            tail: P(Y >= t_i), not increasing, `[size]`.
            decay: e^(-i dt), `[D]`; further terms are left out, which raises delta(epsilon).
        """

        def discounted(i: int) -> float:
            """Returns E[e^(t_i - Y); Y >= t_i]: delta(t_i) is P(Y >= t_i) minus this."""
            window = pmf[i : i + decay.size]
            return float(np.dot(window, decay[: window.size]))

        if tail[-1] > delta:
            raise ValueError(
                f"the grid ends at {self.domain.t_max:.4g}, too low for delta = {delta:.3g}; "
                "use a larger delta or a wider grid"
            )
        if delta >= tail[0]:
            return -math.inf
        low, high = 0, tail.size - 1
        while low < high:
            middle = (low + high) // 2
            if tail[middle] - discounted(middle) <= delta:
                high = middle
            else:
                low = middle + 1
        # In the cell that ends at t_high, delta(eps) = tail - e^(eps - t_high) discounted.
        return self.domain[high] + math.log((tail[high] - delta) / discounted(high))


def discretize(prv: TruncatedPrivacyRandomVariable, domain: Domain) -> DiscretePRV:
    """Rounds a loss to the grid, then moves the grid so that the mean is kept.

    Each point gets the mass within half a spacing of it. With the mean kept, rounding errors of
    many steps are independent with mean 0 and grow like the square root of their number.

    Args:
        prv: the loss; it should be truncated to the grid.
        domain: the grid.

    Raises:
        RuntimeError: if the mean moves by half a spacing or more, which rounding cannot do.
    """
    dt = domain.dt
    first, last = _support(prv, domain)
    edges = domain.t_min + dt * (np.arange(first, last + 1) - 0.5)
    mass = np.diff(prv.cdf(edges))
    pmf = np.zeros(domain.size)
    pmf[first:last] = mass
    shift = prv.mean() - float(np.dot(domain.t_min + dt * np.arange(first, last), mass))
    if not abs(shift) < 0.5 * dt:
        raise RuntimeError(
            f"rounding to a grid of spacing {dt:.3g} moved the mean loss by {shift:.3g}; "
            "use a wider grid or a larger eps_error"
        )
    return DiscretePRV(pmf, domain.shift_right(shift))


def _support(prv: TruncatedPrivacyRandomVariable, domain: Domain) -> tuple[int, int]:
    """Returns the range of grid points outside which the mass is lost in rounding.

    A single step fills a tiny part of a grid that is made for thousands of them.
    """

    def first_edge_with(condition: Any) -> int:
        low, high = 0, domain.size  # edge i lies half a spacing below point i
        while low < high:
            middle = (low + high) // 2
            if condition(float(prv.cdf(domain.t_min + domain.dt * (middle - 0.5)))):
                high = middle
            else:
                low = middle + 1
        return low

    first = max(first_edge_with(lambda probability: probability > _NEGLIGIBLE) - 1, 0)
    return first, max(first_edge_with(lambda probability: probability >= 1.0), first + 1)
