"""Squared norms of gradients as numbers, by parameter name, and how far they may differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.sharded import is_dtensor

# How far norms may differ: relative to the larger one. A tenth of it, relative to the norm of
# the whole gradient, is rounding: some gradients are zero but for that (a bias of the keys).
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}

# Of these, where runs differ in nothing but what the model kept.
STATES = 0.01

# Squared norms [k] by parameter name.
Norms = dict[str, list[float]]


def column(norms: Norms, place: int) -> dict[str, float]:
    """Those of one unit."""
    return {name: values[place] for name, values in norms.items()}


def as_lists(norms: Mapping[str, Tensor]) -> Norms:
    """Norms ``[k]`` as numbers."""
    if not norms:
        return {}
    rows = torch.stack([n.detach().double().cpu() for n in norms.values()]).tolist()
    return dict(zip(norms, rows, strict=True))


def square(grad: Tensor) -> Tensor:
    """The squared norm of a gradient, of any kind."""
    dense = grad.coalesce().values() if grad.is_sparse else grad
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    wide = torch.promote_types(real.dtype, torch.float32)
    norm: Any = torch.linalg.vector_norm(real, dtype=wide)
    return (norm.full_tensor() if is_dtensor(norm) else norm).double() ** 2


def floats(values: list[Tensor]) -> list[float]:
    """Tensors of one element as numbers."""
    return torch.stack([v.cpu() for v in values]).tolist() if values else []


def tolerance_of(model: nn.Module, also: Collection[torch.dtype]) -> float:
    """That of the type with the fewest digits among those that a model computes in."""
    dtypes = {p.dtype for p in model.parameters()} | set(also)
    return max(
        [TOLERANCES[d] for d in dtypes if d in TOLERANCES], default=TOLERANCES[torch.float32]
    )
