"""Composition of rounded privacy losses, exact far out in the tail.

The composed loss near epsilon has a probability of about delta, which drowns in the rounding
errors of a Fourier transform once delta is below 1e-12. So every loss y of a step is first tilted,
its mass multiplied by e^(x y - K(x)). The tilted losses of all steps add up to about epsilon if x
is the minimiser of Chernoff's bound; there they are transformed, multiplied, and tilted back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft  # type: ignore[import-untyped]

from opacus.accountants.analysis.pld.pairs import Pair, log_moment

# Smallest and largest number of grid points of the window, and the number of one step.
_LEAST_POINTS, _MOST_POINTS, _MOST_OF_ONE = 2**13, 2**19, 2**17
# What rounding may add to epsilon, relative to it, unless that takes too many points.
_INACCURACY = 1e-4
# Chernoff's bound is this far above epsilon only if few steps carry most of the loss.
_FAR_BELOW = 0.4
# Part of delta that losses taken for infinite may use.
_INFINITE = 1e-4
# Tilted probability beyond either end of the window, at most.
_OUTSIDE = math.log(1e-12)
# Number of tilts tried; above this product of tilt and spacing, the grid decides which is best.
_COARSE = 0.3
_TILTS = np.geomspace(1e-7, 1e7, 43)
# Frequencies whose power is below e^this are left out: far less than rounding errors.
_VANISHED = -100.0
# e^this is far from overflow.
_LARGEST = 600.0
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Step:
    """`count` steps; the loss of each is that of pair i with probability ``weights[i]``."""

    pairs: tuple[Pair, ...]
    weights: tuple[float, ...]
    count: int


@dataclass(frozen=True)
class _Loss:
    """The loss of one kind of step, at the points of a table or, from `first` on, of a grid."""

    losses: np.ndarray
    masses: np.ndarray
    count: int
    first: int = 0
    infinite: float = 0.0

    def log_moment(self, order: float) -> np.ndarray:
        """Returns log moment, mean and variance of all `count` steps at a tilt, `[3]`."""
        return self.count * np.array(log_moment(self.losses, self.masses, order))


def composed_epsilon(steps: Sequence[Step], delta: float) -> float:
    """Returns an epsilon of at least 0 that bounds the composed loss at `delta` from above.

    Args:
        steps: all steps of a run, for one direction of the neighbouring relation.
        delta: strictly between 0 and 1.
    """
    total = sum(step.count for step in steps)
    tail = max(_INFINITE * delta / total, 1e-290)
    tables = [_table(step, tail) for step in steps]
    order, bound = _best_tilt(tables, delta)
    if not math.isfinite(bound):
        return math.inf
    epsilon = _composed(steps, tables, order, bound, tail, delta)
    if 0.0 < epsilon < _FAR_BELOW * bound:  # a grid made for `bound` was too coarse
        epsilon = min(epsilon, _composed(steps, tables, order, epsilon, tail, delta))
    return epsilon


def _composed(
    steps: Sequence[Step],
    tables: Sequence[_Loss],
    order: float,
    expected: float,
    tail: float,
    delta: float,
) -> float:
    """Returns epsilon on a grid that is fine enough for an epsilon of about `expected`."""
    total = sum(step.count for step in steps)
    low, high = _window(tables, order)
    floors = [_floor(table, 0.1 * _INACCURACY * expected / total) for table in tables]
    reach = max(float(t.losses[-1]) - floor for t, floor in zip(tables, floors, strict=True))
    largest = max(float(np.abs(table.losses[[0, -1]]).max()) for table in tables)
    # Rounding to h adds at most h^2 / 4 to the variance of a step, h^2 / 6 as a rule, and half of
    # (order + 1) times that to epsilon.
    spacing = math.sqrt(12.0 * _INACCURACY * expected / (total * (order + 1.0)))
    spacing = min(spacing, (high - low) / _LEAST_POINTS)
    spacing = max(
        spacing, (high - low) / _MOST_POINTS, reach / _MOST_OF_ONE, 1e-9 * largest, 1e-300
    )
    for _ in range(8):
        losses = [
            _on_grid(step, spacing, tail, floor) for step, floor in zip(steps, floors, strict=True)
        ]
        if order * spacing > _COARSE:  # then rounding has moved the best tilt
            order, _ = _best_tilt(losses, delta)
        window = _window(losses, order)
        if window[1] - window[0] <= 2.0 * _MOST_POINTS * spacing:
            return _epsilon(losses, spacing, order, window, delta)
        spacing *= 2.0
    return math.inf


def _table(step: Step, tail: float) -> _Loss:
    """Returns the loss of a step at a few thousand points."""
    tables = [pair.table(tail) for pair in step.pairs]
    losses = np.concatenate([losses for _, losses, _ in tables])
    weighted = zip(step.weights, tables, strict=True)
    masses = np.concatenate([weight * masses for weight, (_, _, masses) in weighted])
    return _Loss(losses, masses, step.count)


def _floor(table: _Loss, allowed: float) -> float:
    """Returns the floor to raise the lowest losses to, so that their mean grows by `allowed`."""
    by_loss = np.argsort(table.losses, kind="stable")
    losses, below = table.losses[by_loss], np.cumsum(table.masses[by_loss])
    raised = np.concatenate([[0.0], np.cumsum(below[:-1] * np.diff(losses))])
    return float(losses[np.searchsorted(raised, allowed, side="right") - 1])


def _on_grid(step: Step, spacing: float, tail: float, floor: float) -> _Loss:
    """Returns the loss of one step on the grid, a mixture of those of its pairs."""
    parts = [pair.rounded(spacing, tail, floor) for pair in step.pairs]
    first = min(part.first for part in parts)
    masses = np.zeros(max(part.first + len(part.masses) for part in parts) - first)
    infinite = 0.0
    for part, weight in zip(parts, step.weights, strict=True):
        masses[part.first - first : part.first - first + len(part.masses)] += weight * part.masses
        infinite += weight * part.infinite
    losses = spacing * (first + np.arange(len(masses)))
    return _Loss(losses, masses, step.count, first, infinite)


def _best_tilt(losses: Sequence[_Loss], delta: float) -> tuple[float, float]:
    """Returns, about, the x above 0 that minimises (K(x) - log(delta)) / x, and the minimum."""
    with np.errstate(over="ignore", invalid="ignore"):

        def bound(order: float) -> float:
            moment = sum(float(loss.log_moment(order)[0]) for loss in losses)
            value = (moment - math.log(delta)) / order
            return value if math.isfinite(value) else math.inf

        grid = _TILTS
        for _ in range(3):
            values = [bound(order) for order in grid]
            best = int(np.argmin(values))
            ends = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
            order, value = float(grid[best]), values[best]
            grid = np.geomspace(*ends, 7)
    return order, value


def _window(losses: Sequence[_Loss], order: float) -> tuple[float, float]:
    """Returns an interval that the tilted sum leaves with probability e^_OUTSIDE at most."""
    base, mean, variance = sum(loss.log_moment(order) for loss in losses)
    lowest = sum(loss.count * float(loss.losses[0]) for loss in losses)
    highest = sum(loss.count * float(loss.losses[-1]) for loss in losses)
    low, high = lowest, highest
    for shift in np.array([0.5, 1.0, 2.0, 4.0, 7.0, 12.0]) / math.sqrt(variance + 1e-290):
        for sign in (-1.0, 1.0):
            moment = sum(float(loss.log_moment(order + sign * shift)[0]) for loss in losses)
            edge = (moment - base - _OUTSIDE) / shift
            if not math.isfinite(edge):
                continue
            if sign > 0:
                high = min(high, edge)
            else:
                low = max(low, -edge)
    return min(low, mean), max(high, mean)


def _epsilon(
    steps: Sequence[_Loss],
    spacing: float,
    order: float,
    window: tuple[float, float],
    delta: float,
) -> float:
    """Composes losses on one grid and returns epsilon at `delta`."""
    start = math.floor(window[0] / spacing) - 1
    size = next_fast_len(math.ceil(window[1] / spacing) + 2 - start, real=True)
    tilted, base = _compose(steps, spacing, order, start, size)
    total = sum(step.count for step in steps)
    # Bounds of the transform's rounding error at a point, and of the mass above the window.
    tilted = np.maximum(tilted, 0.0) + (64 + total) * _EPS * float(tilted.max())
    losses = spacing * (start + np.arange(size))
    centre = losses[int(np.argmax(tilted))]
    # True masses are `masses` times e^log_scale.
    log_scale = base - order * centre
    # Far below the centre masses overflow; the result is never below the first loss that is kept.
    kept = int(np.searchsorted(losses, centre - _LARGEST / order))
    losses = losses[kept:]
    masses = tilted[kept:] * np.exp(-order * (losses - centre))
    outside = math.exp(_OUTSIDE - order * (losses[-1] - centre))
    infinite = sum(step.count * step.infinite for step in steps)
    left = delta - infinite
    if not left > 0.0:
        return math.inf
    exponent = math.log(left) - log_scale
    target = math.exp(min(exponent, _LARGEST)) - outside
    if not target > 0.0:
        return math.inf
    epsilon = _solve(losses, masses, spacing, target)
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


def _compose(
    steps: Sequence[_Loss], spacing: float, order: float, start: int, size: int
) -> tuple[np.ndarray, float]:
    """Returns the tilted masses of the sum at ``start .. start + size - 1``, and log E[e^(x sum)].

    The transform wraps: mass outside of the window is added inside of it, which only raises
    what is counted.
    """
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    offset, base = 0, 0.0
    for step in steps:
        log, mean, _ = log_moment(step.losses, step.masses, order)
        # A mass without which an exponent overflows is 0.
        tilted = step.masses * np.exp(np.minimum(order * step.losses - log, _LARGEST))
        centre = round(mean / spacing)  # phases then stay small, and their powers exact
        places = (step.first - centre + np.arange(len(tilted))) % size
        factor = rfft(np.bincount(places, weights=tilted, minlength=size))
        counted = np.abs(factor) > math.exp(_VANISHED / step.count)
        spectrum[counted] *= factor[counted] ** step.count
        spectrum[~counted] = 0.0
        offset += step.count * centre
        base += step.count * log
    return np.roll(irfft(spectrum, size), offset - start), base


def _solve(losses: np.ndarray, masses: np.ndarray, spacing: float, target: float) -> float:
    """Returns the epsilon at which E[max(0, 1 - e^(epsilon - loss))] is `target`.

    Args:
        losses: evenly spaced, `[N]`.
        masses: not negative, `[N]`.
        spacing: of the losses.
        target: above 0.
    """
    above = np.cumsum(masses[::-1])[::-1]  # mass at this loss or a higher one
    decay = np.exp(-spacing * np.arange(min(len(masses), math.ceil(45.0 / spacing) + 1)))

    def discounted(i: int) -> float:
        part = masses[i : i + len(decay)]
        return float(np.dot(part, decay[: len(part)]))

    low, high = 0, len(masses) - 1
    if above[high] > target:
        return math.inf
    while low < high:
        middle = (low + high) // 2
        if above[middle] - discounted(middle) <= target:
            high = middle
        else:
            low = middle + 1
    floor = losses[high] - spacing
    excess = above[high] - target
    if excess <= 0.0:
        return float(floor)
    return float(max(floor, losses[high] + math.log(excess / discounted(high))))
