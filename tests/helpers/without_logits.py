"""A language model whose loss needs no logits, and the same with logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.losses import causal_lm_loss

B, T, V, D = 4, 6, 37, 8
LOSS = {"label_smoothing": 0.1, "z_loss": 0.01}
PART = 120  # elements at once: 5 rows of the vocabulary of 37


class Net(nn.Module):
    """Computes its losses itself if it is given labels."""

    def __init__(self, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D)
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.head = nn.Linear(D, V, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        hidden: Tensor = x + self.mlp(x)
        return hidden

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.hidden(tokens)
        if labels is None:
            return hidden
        return causal_lm_loss(hidden, self.head, labels, reduction="none", **LOSS)


def with_logits(model: nn.Module, batch: Any) -> Tensor:
    """``[B]``, plain PyTorch."""
    tokens, labels = batch
    logits, targets = model.head(model.hidden(tokens))[:, :-1], labels[:, 1:]
    flat = logits.reshape(-1, V)
    losses = F.cross_entropy(
        flat, targets.reshape(-1), reduction="none", label_smoothing=LOSS["label_smoothing"]
    ).view(targets.shape)
    losses = losses + LOSS["z_loss"] * logits.logsumexp(-1).square().masked_fill(targets < 0, 0.0)
    return losses.sum(1) / (targets != -100).sum(1).clamp(min=1)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    tokens = torch.randint(V, (B, T))
    labels = tokens.clone()
    labels[0, 2:4] = -100
    labels[1] = -100  # an example without anything to learn
    return tokens, labels


def outside(hidden: Tensor, head: Any, labels: Tensor, reduction: str = "mean") -> Tensor:
    return causal_lm_loss(hidden, head, labels, reduction=reduction, **LOSS)
