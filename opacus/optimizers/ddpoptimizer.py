"""The private optimizer for replicas with different samples (DDP)."""

from __future__ import annotations

import torch.distributed as dist

from opacus.core.ranks.parallelism import DataParallel
from opacus.optimizers.optimizer import DPOptimizer


class DistributedDPOptimizer(DPOptimizer):
    """:class:`DPOptimizer` over all ranks: a sum, then the same noise on each.

    ``expected_batch_size`` is the expected number of samples on one rank; arguments are
    those of :class:`DPOptimizer`.

    Raises:
        RuntimeError: There is no process group.
    """

    _parallelism_class = DataParallel

    def _set_up(self) -> None:
        super()._set_up()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def reduce_gradients(self) -> None:
        """Sum ``p.summed_grad`` over ranks; a step does, before it adds the noise."""
        self.reduce()
