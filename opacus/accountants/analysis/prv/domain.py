"""The grid of privacy losses that random variables are discretised on, and how wide it must be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from opacus.accountants.analysis.rdp import DEFAULT_ORDERS, smallest_epsilon, total_rdp

# Margin of the grid, in losses, beyond the bounds.
MARGIN = 3.0


class Step(Protocol):
    """One use of a mechanism: Gaussian noise on a Poisson sample."""

    noise_multiplier: float
    sample_rate: float


@dataclass(frozen=True)
class Domain:
    """An evenly spaced grid of privacy losses.

    Attributes:
        t_min: first point.
        t_max: last point.
        size: number of points; even, for the real Fourier transform.
        shifts: how far the grid was moved from its aligned place, where 0 is a point of it.
    """

    t_min: float
    t_max: float
    size: int
    shifts: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 2 or self.size % 2 != 0:
            raise ValueError(f"size must be even and at least 2, got {self.size!r}")
        if not self.t_min < self.t_max:
            raise ValueError(f"t_min must be below t_max, got {self.t_min!r} and {self.t_max!r}")

    @classmethod
    def create_aligned(cls, t_min: float, t_max: float, dt: float) -> Domain:
        """Creates the smallest grid of multiples of `dt` around [t_min, t_max] of even size."""
        if not dt > 0.0:
            raise ValueError(f"dt must be above 0, got {dt!r}")
        first, last = math.floor(t_min / dt), math.ceil(t_max / dt)
        last += (last - first + 1) % 2
        return cls(first * dt, last * dt, last - first + 1)

    def shift_right(self, dt: float) -> Domain:
        """Returns the grid moved by `dt`, which need not be a multiple of the spacing."""
        return replace(self, t_min=self.t_min + dt, t_max=self.t_max + dt, shifts=self.shifts + dt)

    @property
    def dt(self) -> float:
        """The spacing."""
        return (self.t_max - self.t_min) / (self.size - 1)

    @property
    def ts(self) -> np.ndarray:
        """All points, `[size]`."""
        return np.linspace(self.t_min, self.t_max, self.size)

    def __getitem__(self, i: int) -> float:
        return self.t_min + i * self.dt


def compute_safe_domain_size(
    prvs: Sequence[Step],
    max_self_compositions: Sequence[int],
    eps_error: float,
    delta_error: float,
) -> float:
    """Returns L such that cutting all losses to [-L, L] costs less than `delta_error` of delta.

    Section 5 of arXiv 2106.02848: the composition leaves [-L, L] with probability below
    delta_error / 4, and one step with probability below delta_error / 8 / number of steps, both
    by their Renyi divergences.

    Args:
        prvs: the distinct mechanisms.
        max_self_compositions: how often each is used.
        eps_error: the error in epsilon that is aimed at.
        delta_error: the error in delta that is allowed.
    """
    orders = np.asarray(DEFAULT_ORDERS, dtype=np.float64)
    one_step_delta = delta_error / (8.0 * sum(max_self_compositions))
    widest, counts = eps_error, Counter[tuple[float, float]]()
    for prv, steps in zip(prvs, max_self_compositions, strict=True):
        key = (prv.noise_multiplier, prv.sample_rate)
        counts[key] += steps
        one_step = total_rdp({key: 1}, orders)
        widest = max(widest, smallest_epsilon(orders, one_step, one_step_delta)[0])
    composed = smallest_epsilon(orders, total_rdp(counts, orders), delta_error / 4.0)[0]
    return max(widest, composed) + MARGIN
