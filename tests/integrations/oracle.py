"""Clipped sums of per-example gradients, one example at a time through plain autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def next_tokens(model: Any, row: dict[str, Tensor]) -> Tensor:
    """The model's own loss of one text by itself, without padding."""
    length = int(row["attention_mask"].sum())
    own = {k: v[:, :length] for k, v in row.items()}
    return model(**own).loss


def classes(model: Any, row: dict[str, Tensor]) -> Tensor:
    length = int(row["attention_mask"].sum())
    logits = model(row["input_ids"][:, :length]).logits
    return F.cross_entropy(logits, row["labels"])


def rows_of(batch: Any) -> list[dict[str, Tensor]]:
    """The examples of a logical batch, each as a batch of one."""
    rows = []
    for chunk, size in zip(batch.chunks, batch.sizes, strict=True):
        rows += [{k: v[i : i + 1] for k, v in chunk.items()} for i in range(size)]
    return rows


def clipped_sum(
    model: Any,
    rows: list[dict[str, Tensor]],
    clipping_norm: float,
    loss: Callable[[Any, dict[str, Tensor]], Tensor] = next_tokens,
) -> tuple[dict[str, Tensor], list[float]]:
    """Sum over examples of their gradients, clipped; and the norms before that."""
    exact = copy.deepcopy(model).double()
    exact.train()
    names, parameters = zip(
        *[(n, p) for n, p in exact.named_parameters() if p.requires_grad], strict=True
    )
    total = {n: torch.zeros_like(p) for n, p in zip(names, parameters, strict=True)}
    norms = []
    for row in rows:
        grads = torch.autograd.grad(loss(exact, row), parameters, allow_unused=True)
        grads = [
            torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)
        ]
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        norms.append(norm)
        for name, grad in zip(names, grads, strict=True):
            total[name] += grad * min(1.0, clipping_norm / norm)
    return total, norms
