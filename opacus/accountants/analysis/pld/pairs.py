"""Pairs of Gaussian mixtures, and their privacy loss rounded up to a grid.

The loss of a pair (upper, lower) is ``log(upper(z) / lower(z))`` with z drawn from upper. Mass is
moved to the grid so that both the upper and the lower probability of every cell are kept ("connect
the dots", arXiv 2207.04380): the rounded pair is at least as easy to tell apart, and its loss is
wrong only in the second order of the grid's spacing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri  # type: ignore[import-untyped]

# Points of the table from which the edges of the cells are interpolated.
_TABLE = 2**12
# An edge may miss its grid point by this part of the spacing; as much mass is rounded up in full.
_SLACK = 1e-7
# Below this probability the lowest losses are moved up to where they start to be resolved.
_LOWEST = 1e-24
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Mixture:
    """Sum over i of ``weights[i] * N(means[i], 1)``."""

    means: tuple[float, ...]
    weights: tuple[float, ...]

    def log_density(self, z: np.ndarray) -> np.ndarray:
        """Returns the log of the density at `z`, of the same shape, up to a constant."""
        terms = [
            math.log(w) + m * (z - 0.5 * m)
            for m, w in zip(self.means, self.weights, strict=True)
            if w > 0.0
        ]
        total = functools.reduce(np.logaddexp, terms)
        return np.asarray(total + np.zeros_like(z))

    def slope(self, z: np.ndarray) -> np.ndarray:
        """Returns the derivative of `log_density`: the expected mean at `z`."""
        log = self.log_density(z)
        return np.asarray(
            sum(
                w * m * np.exp(np.minimum(m * (z - 0.5 * m) - log, 700.0))
                for m, w in zip(self.means, self.weights, strict=True)
            )
        )

    def mass(self, edges: np.ndarray) -> np.ndarray:
        """Returns the probability between neighbouring edges, also far out, `[len(edges) - 1]`."""
        total = np.zeros(len(edges) - 1)
        for mean, weight in zip(self.means, self.weights, strict=True):
            low, high = edges[:-1] - mean, edges[1:] - mean
            right = low > 0.0  # there, differences of the other tail keep their digits
            first, last = np.where(right, -high, low), np.where(right, -low, high)
            total += weight * (ndtr(last) - ndtr(first))
        return total


@dataclass(frozen=True)
class Rounded:
    """A loss on the grid: ``masses[i]`` at ``(first + i) * spacing``, the rest at infinity."""

    first: int
    masses: np.ndarray
    infinite: float


@dataclass(frozen=True)
class Pair:
    """Two mixtures of unit variance whose log ratio does not decrease in z."""

    upper: Mixture
    lower: Mixture

    def loss(self, z: np.ndarray) -> np.ndarray:
        """Returns log(upper(z) / lower(z)), of the same shape."""
        return self.upper.log_density(z) - self.lower.log_density(z)

    @functools.lru_cache(maxsize=64)  # noqa: B019  pairs are small and immutable
    def table(self, tail: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns outputs, their losses and the upper probability around each, `[_TABLE]`.

        Args:
            tail: upper probability beyond the last output, at most.
        """
        low = min(self.upper.means) + float(ndtri(_LOWEST))
        high = max(self.upper.means) - float(ndtri(tail))
        z = np.linspace(low, high, _TABLE)
        middles = np.concatenate([[low], 0.5 * (z[1:] + z[:-1]), [high]])
        return z, np.maximum.accumulate(self.loss(z)), self.upper.mass(middles)

    def rounded(self, spacing: float, tail: float, floor: float = -math.inf) -> Rounded:
        """Returns the loss rounded up to multiples of `spacing`.

        Args:
            spacing: of the grid, above 0.
            tail: upper probability whose losses may count as infinite.
            floor: losses below are raised to it.
        """
        outputs, losses, _ = self.table(tail)
        start = min(int(np.searchsorted(losses, floor)), len(losses) - 2)
        outputs, losses = outputs[start:], losses[start:]
        first, last = math.ceil(losses[0] / spacing), math.floor(losses[-1] / spacing)
        inner = self._outputs_at(spacing * np.arange(first, last + 1), outputs, losses)
        z = np.concatenate([outputs[:1], inner, outputs[-1:]])
        loss = np.clip(np.maximum.accumulate(self.loss(z)) / spacing, first - 1.0, last + 1.0)
        left = np.floor(loss[:-1] + _SLACK).astype(np.int64)
        right = np.maximum(np.ceil(loss[1:] - _SLACK).astype(np.int64), left)
        below = float(self.upper.mass(np.array([-math.inf, z[0]]))[0])  # raised to the first loss
        upper = np.append(self.upper.mass(z), below)
        lower = np.append(self.lower.mass(z), below * math.exp(-losses[0]))
        left = np.append(left, math.floor(losses[0] / spacing))
        right = np.append(right, math.ceil(losses[0] / spacing))
        # r at `right` and the rest at `left` keep `upper` and `lower`:
        # (upper - r) e^-left + r e^-right = lower.
        width = spacing * np.maximum(right - left, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            raised = upper - lower * np.exp(np.minimum(spacing * left, 700.0))
        share = raised / -np.expm1(-width)
        share += (_SLACK + 4.0 * _EPS / width) * upper  # rounding errors count as raised losses
        share = np.where(np.isfinite(share), np.clip(share, 0.0, upper), upper)
        masses = np.bincount(right - (first - 1), weights=share, minlength=last - first + 3)
        masses += np.bincount(left - (first - 1), weights=upper - share, minlength=len(masses))
        infinite = float(self.upper.mass(np.array([z[-1], math.inf]))[0])
        return Rounded(first - 1, masses, infinite)

    def _outputs_at(
        self, targets: np.ndarray, outputs: np.ndarray, losses: np.ndarray
    ) -> np.ndarray:
        """Returns increasing outputs whose losses are `targets`, nearly, by Newton steps."""
        z = np.interp(targets, losses, outputs)
        reach = outputs[1] - outputs[0]
        low, high = z - reach, z + reach
        for _ in range(4):
            slope = self.upper.slope(z) - self.lower.slope(z)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                step = (targets - self.loss(z)) / slope
            z = np.clip(z + np.where(np.isfinite(step), step, 0.0), low, high)
        return np.clip(np.maximum.accumulate(z), outputs[0], outputs[-1])


def log_moment(losses: np.ndarray, masses: np.ndarray, order: float) -> tuple[float, float, float]:
    """Returns log E[e^(order loss)], and mean and variance of the loss tilted by it.

    Args:
        losses: `[N]`.
        masses: `[N]`, not negative.
        order: the tilt.
    """
    exponent = np.where(masses > 0.0, order * losses, -math.inf)
    peak = float(exponent.max())
    tilted = masses * np.exp(exponent - peak)
    total = float(tilted.sum())
    log = peak + math.log(total)
    tilted /= total
    mean = float(np.dot(tilted, losses))
    return log, mean, float(np.dot(tilted, (losses - mean) ** 2))
