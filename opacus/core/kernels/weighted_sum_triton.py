"""GPU kernel of :func:`opacus.core.kernels.weighted_sum.weighted_sum`: one pass over the rows."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(
    grads: Any,
    factors: Any,
    excluded: Any,
    out: Any,
    size: Any,
    segment: Any,
    out_stride: Any,
    batch: Any,
    BLOCK: tl.constexpr,  # noqa: N803 (Triton's convention)
    WIDE: tl.constexpr,  # noqa: N803
) -> None:
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for row in range(batch):
        factor = tl.load(factors + row).to(WIDE)
        skip = tl.load(excluded + row) != 0
        value = tl.load(grads + row * size + places, mask=inside, other=0.0).to(WIDE)
        total += tl.where(skip, 0.0, value * factor)
    # The result may be cut into segments that lie ``out_stride`` apart.
    target = out + (places // segment) * out_stride + places % segment
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


def launch(grads: Tensor, factors: Tensor, excluded: Tensor, out: Tensor) -> None:
    """Write the weighted sum of ``grads`` ``[B, *shape]`` to ``out``.

    Args:
        grads: Contiguous.
        factors: ``[B]``.
        excluded: ``[B]`` bool, on the same device.
        out: Contiguous, or ``[W, ...]`` with contiguous rows.
    """
    size = grads[0].numel()
    if size == 0:
        return
    if out.is_contiguous():
        segment, stride = size, size
    else:
        segment, stride = out[0].numel(), out.stride(0)
        if not out[0].is_contiguous():
            raise ValueError(f"out has strides {out.stride()} for shape {tuple(out.shape)}")
    wide = tl.float64 if grads.dtype == torch.float64 else tl.float32
    grid = (triton.cdiv(size, BLOCK),)
    _kernel[grid](
        grads,
        factors.to(grads.device),
        excluded.to(torch.uint8),
        out,
        size,
        segment,
        stride,
        len(grads),
        BLOCK=BLOCK,
        WIDE=wide,
        num_warps=8,
    )
