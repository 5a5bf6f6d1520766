"""Squared norms of gradients as numbers, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opacus.core.platform.sharded import is_dtensor

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
