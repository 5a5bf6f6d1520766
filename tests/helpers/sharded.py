"""A problem on several ranks: its batch, its loader, its model distributed in some way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.problems import PROBLEMS

B = 8


def loader(name: str) -> DataLoader[Any]:
    data = TensorDataset(*batch_here(name))
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=B, sampler=sampler)


def batch_here(name: str) -> tuple[Tensor, Tensor]:
    """The batch as drawn on the CPU, on this rank's device."""
    with torch.device("cpu"):
        inputs, targets = PROBLEMS[name].batch(B)
    device = torch.get_default_device()
    return inputs.to(device), targets.to(device)


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "fsdp":
        return FSDP2Wrapper(model)
    if how == "fsdp_leaves":
        return FSDP2Wrapper(model, use_block_wrapping=False, wrap_individual_layers=True)
    if how == "fsdp_root":
        return FSDP2Wrapper(model, use_block_wrapping=False)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return DPDDP(model)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
