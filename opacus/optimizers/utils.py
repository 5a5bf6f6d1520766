"""Helpers shared by the optimizers."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def params(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters that the optimizer updates and that require gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
