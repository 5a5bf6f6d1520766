"""Private models of tokens whose loss is one number a sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.oracle import trainable


class Mean(nn.Module):
    """A criterion of losses that are the samples' already, ``[B]``."""

    reduction = "mean"

    def forward(self, losses: Tensor, _: Any = None) -> Tensor:
        return losses if self.reduction == "none" else losses.mean()


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """``[B]`` of logits ``[B, T, V]`` and tokens ``[B, T]``."""
    losses = nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    return losses.mean(1)


def private(model: nn.Module, c: float, mode: str, rows: int) -> tuple[Any, Any, Any]:
    """Model, optimizer and criterion of steps without noise on ``rows`` samples."""
    made: Any = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(trainable(model)[1], lr=0.0), criterion=Mean(),
        data_loader=DataLoader(TensorDataset(torch.zeros(rows, 1)), batch_size=rows),
        noise_multiplier=0.0, max_grad_norm=c, poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    return (*made[:2], made[2] if len(made) == 4 else Mean())
