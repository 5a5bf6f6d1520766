"""Rows times clipping factors, where excluded rows may hold NaN or infinity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.sums.weighted_sum import triton_works
from opacus.core.platform.sharded import is_dtensor
from opacus.core.platform.torch_internals import as_sharded


class Inputs:
    """:func:`scaled_rows` of the inputs of layers; those in a row often share them."""

    def __init__(self) -> None:
        self._key: Any = None
        self._scaled: tuple[Tensor, ...] = ()
        # Kept, so that no other tensor takes their place in memory.
        self._given: Any = None

    def scaled(
        self, tensors: tuple[Tensor, ...], factors: Tensor | None, excluded: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Each scaled, but for indices; see :func:`scaled_rows`."""
        if any(type(t) is not Tensor and is_dtensor(t) for t in tensors):  # these have no address
            return _each(tensors, factors, excluded)
        own = (0,) if factors is None else (factors.data_ptr(), factors._version)
        # With the version: hooks of saved tensors may bring all of them into one buffer.
        key = (*own, *((t.data_ptr(), t._version, t.dtype, t.shape, t.stride()) for t in tensors))
        if key != self._key:
            self._key, self._given = key, (tensors, factors)
            self._scaled = _each(tensors, factors, excluded)
        return self._scaled


def _each(
    tensors: tuple[Tensor, ...], factors: Tensor | None, excluded: Tensor | None
) -> tuple[Tensor, ...]:
    return tuple(scaled_rows(t, factors, excluded) if t.is_floating_point() else t for t in tensors)


def scaled_rows(rows: Tensor, factors: Tensor | None, excluded: Tensor | None) -> Tensor:
    """``factors[i] * rows[i]``, and zero where ``excluded[i]``.

    Computed in at least fp32: a factor that was itself rounded to bf16 could be 0.4% too
    large, and so would be the clipped gradient.

    Args:
        rows: ``[B, ...]``, floating point.
        factors: ``[B]``; ``None`` leaves the rows that are kept as they are.
        excluded: ``[B]`` bool, on the device of ``rows``; ``None``: there are none.
    """
    plain = type(rows) is Tensor
    if not plain and is_dtensor(rows):  # under tensor parallelism: every rank has all samples
        if any(place.is_shard(0) for place in rows.placements):
            return scaled_rows(rows.full_tensor(), factors, excluded)
        return as_sharded(scaled_rows(rows.to_local(), factors, excluded), rows)
    # A kernel cannot read a DTensor.
    fused = plain and rows.is_cuda and rows.is_contiguous() and rows.dtype != torch.float64
    if fused and triton_works() and (factors is None or factors.dtype == torch.float32):
        from opacus.core.kernels.sums import scaled_rows_triton

        return scaled_rows_triton.launch(rows, factors, excluded)
    column = [-1] + [1] * (rows.dim() - 1)
    if excluded is not None:
        rows = rows.masked_fill(excluded.view(column), 0.0)
    if factors is None:
        return rows
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows * factors.to(wide).view(column)).to(rows.dtype)
