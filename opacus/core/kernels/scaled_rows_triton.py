"""GPU kernel that multiplies rows by clipping factors and clears excluded ones, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels import operands

BLOCK = 4096


@triton.jit
def _kernel(
    rows,
    factors,
    excluded,
    out,
    size,
    HAS_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    start = row.to(tl.int64) * size
    # An excluded row is not even read: it may hold NaN.
    keep = tl.load(excluded + row) == 0
    value = tl.load(rows + start + places, mask=inside & keep, other=0.0)
    if HAS_FACTORS:
        value = value.to(tl.float32) * tl.load(factors + row)
    tl.store(out + start + places, value.to(out.dtype.element_ty), mask=inside)


def launch(rows: Tensor, factors: Tensor | None, excluded: Tensor) -> Tensor:
    """``factors[i] * rows[i]``, zero where ``excluded[i]``, in the dtype of ``rows``.

    Args:
        rows: ``[B, ...]``, contiguous, at most fp32.
        factors: ``[B]``, fp32; ``None`` leaves the rows that are kept as they are.
        excluded: ``[B]`` bool.
    """
    out = torch.empty_like(rows)
    if rows.numel() == 0:
        return out
    size = rows[0].numel()
    _kernel[(operands.parts(size, BLOCK), len(rows))](
        rows,
        rows if factors is None else factors,
        excluded.view(torch.uint8),
        out,
        size,
        HAS_FACTORS=factors is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
