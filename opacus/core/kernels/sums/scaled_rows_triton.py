"""GPU kernel that multiplies rows by clipping factors and clears excluded ones, in one pass."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant

BLOCK = 4096


@triton.jit
def _kernel(
    rows,
    factors,
    excluded,
    out,
    size,
    HAS_FACTORS: tl.constexpr,
    HAS_EXCLUDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    start = row.to(tl.int64) * size
    read = size
    if HAS_EXCLUDED:  # such a row is not even read: it may hold NaN
        read = tl.where(tl.load(excluded + row) == 0, size, 0)
    value = tl.load(rows + start + places, mask=places < read, other=0.0)
    if HAS_FACTORS:
        value = value.to(tl.float32) * tl.load(factors + row)
    tl.store(out + start + places, value.to(out.dtype.element_ty), mask=inside)


def launch(rows: Tensor, factors: Tensor | None, excluded: Tensor | None) -> Tensor:
    """``factors[i] * rows[i]``, zero where ``excluded[i]``, in the dtype of ``rows``.

    Args:
        rows: ``[B, ...]``, contiguous, at most fp32.
        factors: ``[B]``, fp32; ``None`` leaves the rows that are kept as they are.
        excluded: ``[B]`` bool; ``None``: there are none.
    """
    out = torch.empty_like(rows)
    count, elements = rows.shape[0], rows.numel()
    if elements == 0:
        return out
    size = elements // count
    _variant(factors is not None, excluded is not None)(
        (operands.parts(size, BLOCK), count),
        rows,
        rows if factors is None else factors,
        rows if excluded is None else excluded.view(torch.uint8),
        out,
        size,
    )
    return out


@functools.cache
def _variant(has_factors: bool, has_excluded: bool) -> Variant:
    return Variant(
        _kernel, HAS_FACTORS=has_factors, HAS_EXCLUDED=has_excluded, BLOCK=BLOCK, num_warps=8
    )
