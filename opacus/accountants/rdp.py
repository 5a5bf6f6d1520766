"""Accounting by Renyi differential privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from opacus.accountants.accountant import IAccountant, reject_unknown_arguments
from opacus.accountants.analysis import rdp as analysis
from opacus.accountants.analysis.rdp_orders import best_order
from opacus.accountants.history import check_delta, merge


class RDPAccountant(IAccountant):
    """Adds up Renyi divergences order by order and converts the sum to (epsilon, delta).

    Every value is a proven upper bound for Poisson-sampled Gaussian steps, whatever their number
    and however their noise changes (arXiv 1908.10530). It is fast, and looser than
    `PRVAccountant`, most of all for few steps. Where the best of `DEFAULT_ALPHAS` is the first or
    the last, orders beyond them are searched too.
    """

    DEFAULT_ALPHAS: ClassVar[list[float]] = list(analysis.DEFAULT_ORDERS)

    def get_privacy_spent(
        self, *, delta: float, alphas: Sequence[float] | None = None
    ) -> tuple[float, float]:
        """Returns the smallest epsilon over the orders, and the order that gives it.

        Args:
            delta: strictly between 0 and 1.
            alphas: Renyi orders to try, each above 1; if None, `DEFAULT_ALPHAS`, and those beyond
                them where they give less.

        Returns:
            (epsilon, order); (0, 0) if nothing that leaks was recorded.
        """
        delta = check_delta(delta)
        counts = merge(self.history)
        if not counts:
            return 0.0, 0.0
        if alphas is None:
            return best_order(counts, delta)
        orders = np.atleast_1d(alphas).astype(float)
        total = analysis.total_rdp(counts, orders)
        return analysis.get_privacy_spent(orders=orders, rdp=total, delta=delta)

    def get_epsilon(
        self, delta: float, alphas: Sequence[float] | None = None, **kwargs: Any
    ) -> float:
        """Returns an epsilon for which all recorded steps together are (epsilon, delta)-DP.

        Args:
            delta: strictly between 0 and 1.
            alphas: Renyi orders to try, each above 1; if None, `DEFAULT_ALPHAS`, and those beyond
                them where they give less.
            **kwargs: none is known; any raises TypeError.
        """
        reject_unknown_arguments("RDPAccountant.get_epsilon", kwargs)
        return self.get_privacy_spent(delta=delta, alphas=alphas)[0]

    @classmethod
    def mechanism(cls) -> str:
        return "rdp"
