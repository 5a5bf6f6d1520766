"""The private optimizer for ghost clipping under tensor parallelism."""

from __future__ import annotations

from opacus.core.ranks.parallelism import TensorParallel
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


class TPOptimizerFastGradientClipping(DPOptimizerFastGradientClipping):
    """:class:`DPOptimizerFastGradientClipping` for layers that are split over ranks.

    Each rank draws the noise of its own shards from a stream of its own; parameters that
    every rank holds get the same noise on all of them.
    """

    _parallelism_class = TensorParallel
