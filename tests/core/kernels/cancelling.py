"""Samples whose gradient is far shorter than its terms, and their norms in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

# Lengths of what is left, relative to the terms; at 1 nothing cancels.
LEFT = [1.0, 0.2, 0.05, 1e-2, 1e-3]
KINDS = ["opposite tokens", "large mean"]


def pair(kind: str, left: float, batch: int, tokens: int, d: int, p: int) -> tuple[Tensor, Tensor]:
    """Activations ``[B, T, d]`` and backprops ``[B, T, p]`` in fp32; T is even."""
    if kind == "opposite tokens":
        u, g = torch.randn(batch, tokens // 2, d), torch.randn(batch, tokens // 2, p)
        return torch.cat([u, left * torch.randn_like(u) - u], 1), torch.cat([g, g], 1)
    a = torch.randn(batch, 1, d) + left * torch.randn(batch, tokens, d)
    g = torch.randn(batch, tokens, p)
    return a, g - g.mean(1, keepdim=True)


def exact(a: Tensor, g: Tensor) -> Tensor:
    """``[B]`` squared norms, and what matters: how much shorter they are than their terms."""
    return torch.einsum("btd,btp->bdp", a.double(), g.double()).square().sum((1, 2))


def share(a: Tensor, g: Tensor) -> Tensor:
    """``[B]``: the squared norm relative to the sizes of what Gram matrices add up."""
    terms = (a.double() @ a.double().mT) * (g.double() @ g.double().mT)
    return exact(a, g) / terms.abs().sum((1, 2))
