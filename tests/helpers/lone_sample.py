"""Batches of one sample, compared with the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.problems import PROBLEMS

C = 0.1


def private(
    model: nn.Module,
    mode: str = "ghost_bk",
    loss: Any = None,
    rows: tuple[Tensor, ...] = (torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)),
    **kwargs: Any,
) -> tuple[Any, Any, Any]:
    """Module, optimizer and criterion; no noise, no Poisson sampling."""
    settings = {"noise_multiplier": 0.0, "max_grad_norm": C, "poisson_sampling": False} | kwargs
    module, optimizer, loss, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss() if loss is None else loss,
        data_loader=DataLoader(TensorDataset(*rows), batch_size=4),
        grad_sample_mode=mode,
        **settings,
    )
    return module, optimizer, loss


def prove(module: Any, optimizer: Any, loss: Any, inputs: Tensor, targets: Tensor) -> None:
    """A step of several samples: after it a lone one is not tapped."""
    loss(module(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def vectors(size: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    return PROBLEMS["mlp"].batch(size, seed)


def no_gradient(model: nn.Module) -> bool:
    return all(p.grad is None or not p.grad.any() for p in model.parameters())
