"""``DistributedDataParallel`` around a private model, whose optimizer sums the gradients itself."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# What stands for a reduction at the end of a backward pass.
_REDUCES = ("require_backward_grad_sync", "static_graph")


class WithoutReduction:
    """Lets replicas reduce no gradients of their own, until it is removed.

    Layers run on detached parameters, so autograd forms none. Compiled graphs give some of them
    nonetheless (``None``, or zeros), and the next forward pass would fail for want of the others.

    Args:
        model: The private model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._before = [{name: getattr(r, name) for name in _REDUCES} for r in self._replicas]
        self._handles = [r.register_forward_pre_hook(_follow_buffers) for r in self._replicas]
        for replica in self._replicas:
            vars(replica).update(dict.fromkeys(_REDUCES, False))

    def remove(self) -> None:
        """The replicas do as they did."""
        for handle in self._handles:
            handle.remove()
        for replica, before in zip(self._replicas, self._before, strict=True):
            vars(replica).update(before)


def _follow_buffers(replica: Any, args: Any) -> None:
    """Buffers are still those of rank 0; without reductions a replica takes them once only."""
    replica.require_forward_param_sync = True
