"""Data parallelism without gradient hooks: the private optimizer reduces gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of all parameters over the ranks, in place.

    Not for private training, whose optimizers sum clipped gradients themselves.

    Args:
        model: Each rank's replica, after its own backward pass.
    """
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= world_size


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Replicates a model over ranks; gradients stay local until the optimizer has noised them.

    Parameters and buffers are broadcast from rank 0. With a distributed private
    optimizer the clipped gradients are summed over ranks after clipping.

    Args:
        model: The model; reachable as ``module``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, src=0)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)
