"""Renyi orders beyond the default ones, searched only where they help.

With ``K(x) = x * rdp(1 + x)``, which is convex, the bound ``(K(x) + log(1 / delta)) / x`` has one
valley. If the best of the default orders is not at their end, it lies in that valley; if it is,
the valley lies beyond, and is found on a coarse and then on two finer grids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from opacus.accountants.analysis.rdp import DEFAULT_ORDERS, smallest_epsilon, total_rdp

# Orders minus 1. Beyond 1e8 an epsilon below 1e-6 would be at stake.
_BELOW = tuple(np.geomspace(1e-4, 0.1, 16)[:-1].tolist())
_ABOVE = tuple(np.geomspace(62.0, 1e8, 64).tolist())
# Values of each finer grid, between the neighbours of the best order so far.
_FINER = 13


def best_order(counts: Mapping[tuple[float, float], int], delta: float) -> tuple[float, float]:
    """Returns the smallest epsilon over the default orders and, if need be, over others.

    Args:
        counts: steps of each (noise multiplier, sample rate).
        delta: strictly between 0 and 1.

    Returns:
        (epsilon, order); never above the epsilon of the default orders.
    """
    orders = np.asarray(DEFAULT_ORDERS, dtype=np.float64)
    total = total_rdp(counts, orders)
    epsilon, best = smallest_epsilon(orders, total, delta)
    if 0 < best < len(orders) - 1 or epsilon == 0.0:
        return epsilon, float(orders[best])
    # No test tells the outputs apart by more than sqrt(1 - e^-divergence) (Bretagnolle and Huber).
    if delta**2 > -math.expm1(-total[0]):
        return 0.0, float(orders[0])
    found = (epsilon, float(orders[best]))
    grid = 1.0 + np.array((*_BELOW, 0.1, 0.2) if best == 0 else (61.0, *_ABOVE))
    for _ in range(3):
        epsilon, best = smallest_epsilon(grid, total_rdp(counts, grid), delta)
        found = min(found, (epsilon, float(grid[best])))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        grid = 1.0 + np.geomspace(low - 1.0, high - 1.0, _FINER)
    return found
