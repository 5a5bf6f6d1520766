"""The private optimizer for ghost clipping under DDP."""

from __future__ import annotations

from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


class DistributedDPOptimizerFastGradientClipping(
    DPOptimizerFastGradientClipping, DistributedDPOptimizer
):
    """:class:`DPOptimizerFastGradientClipping` over all ranks.

    See :class:`DistributedDPOptimizer` for what that means.
    """
