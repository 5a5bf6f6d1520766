"""Rows times clipping factors, where excluded rows may hold NaN or infinity."""

from __future__ import annotations

import torch
from torch import Tensor

from opacus.core.kernels.reference import widen
from opacus.core.kernels.weighted_sum import triton_works


def without_excluded(tensors: tuple[Tensor, ...], excluded: Tensor) -> tuple[Tensor, ...]:
    """The same tensors with zeros in the excluded rows; indices stay as they are."""
    return tuple(scaled_rows(t, None, excluded) if t.is_floating_point() else t for t in tensors)


def scaled_rows(rows: Tensor, factors: Tensor | None, excluded: Tensor) -> Tensor:
    """``factors[i] * rows[i]``, and zero where ``excluded[i]``.

    Computed in at least fp32: a factor that was itself rounded to bf16 could be 0.4% too
    large, and so would be the clipped gradient.

    Args:
        rows: ``[B, ...]``, floating point.
        factors: ``[B]``; ``None`` leaves the rows that are kept as they are.
        excluded: ``[B]`` bool, on the device of ``rows``; there nothing waits for a GPU.
    """
    plain = type(rows) is Tensor and rows.is_cuda  # a kernel cannot read a DTensor
    fused = plain and rows.is_contiguous() and rows.dtype != torch.float64
    if fused and triton_works() and (factors is None or factors.dtype == torch.float32):
        from opacus.core.kernels import scaled_rows_triton

        return scaled_rows_triton.launch(rows, factors, excluded)
    column = [-1] + [1] * (rows.dim() - 1)
    if rows.is_cuda or bool(excluded.any()):
        rows = rows.masked_fill(excluded.view(column), 0.0)
    if factors is None:
        return rows
    return (rows * factors.to(widen(rows.new_empty(0)).dtype).view(column)).to(rows.dtype)
