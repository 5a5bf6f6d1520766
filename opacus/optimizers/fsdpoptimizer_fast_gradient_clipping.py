"""The private optimizer for ghost clipping under FSDP2."""

from __future__ import annotations

import torch.distributed as dist

from opacus.core.ranks.parallelism import Sharded
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping


class FSDPOptimizerFastGradientClipping(DPOptimizerFastGradientClipping):
    """:class:`DPOptimizerFastGradientClipping` for sharded parameters.

    FSDP2 has summed the clipped gradients over ranks. Each rank draws the noise of its
    own shard only, a function of the elements' numbers in the whole parameter, so that it has
    the right scale for ``"mean"`` and ``"sum"`` and is the same whatever the world size.
    ``expected_batch_size`` is the expected number of samples on one rank.

    Raises:
        RuntimeError: There is no process group.
    """

    _parallelism_class = Sharded
    _overwrites_sums = True

    def _set_up(self) -> None:
        super()._set_up()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
