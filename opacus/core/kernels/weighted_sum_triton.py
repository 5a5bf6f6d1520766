"""GPU kernel of :mod:`opacus.core.kernels.weighted_sum`: many sums in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels.triton_host import TYPES

BLOCK = 2048
COLUMNS = 7


@triton.jit
def _kernel(
    table,
    excluded,
    out,
    out_stride,
    count,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Which row of the table this block belongs to: the last that starts at or before it.
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, COUNT)
    starts = tl.load(table + lanes * COLUMNS, mask=lanes < count, other=1 << 62)
    entry = table + (tl.sum((starts <= block).to(tl.int64)) - 1) * COLUMNS
    first = tl.load(entry)
    grads = tl.load(entry + 1).to(tl.pointer_type(DTYPE))
    factors = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 3)
    segment = tl.load(entry + 4)
    start = tl.load(entry + 5)
    rows = tl.load(entry + 6)

    places = (block - first) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for row in range(rows):
        factor = tl.load(factors + row).to(WIDE)
        skip = tl.load(excluded + row) != 0
        value = tl.load(grads + tl.cast(row, tl.int64) * size + places, mask=inside, other=0.0)
        total += tl.where(skip, 0.0, value.to(WIDE) * factor)
    # The result may be cut into segments that lie ``out_stride`` apart.
    target = out + start + (places // segment) * out_stride + places % segment
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Sum:
    """One weighted sum of a launch.

    Attributes:
        grads: ``[B, *shape]``, contiguous; the dtype is the same in all of a launch.
        factors: ``[B]``, fp32.
        start: Where in ``out`` its first element goes.
        segment: So many elements follow each other there; the next ones come a stride on.
    """

    grads: Tensor
    factors: Tensor
    start: int
    segment: int


def launch(sums: Sequence[Sum], excluded: Tensor, out: Tensor, stride: int) -> None:
    """Write all weighted sums into ``out``.

    Args:
        sums: What is to be summed, and where it goes.
        excluded: ``[B]`` bool; these rows contribute nothing.
        out: The storage that is written to.
        stride: Elements between a segment and the next.
    """
    sums = [s for s in sums if s.grads.numel()]
    if not sums:
        return
    rows, blocks = [], 0
    for s in sums:
        size = s.grads[0].numel()
        rows.append(
            (
                blocks,
                s.grads.data_ptr(),
                s.factors.data_ptr(),
                size,
                s.segment,
                s.start,
                len(s.grads),
            )
        )
        blocks += triton.cdiv(size, BLOCK)
    table = torch.tensor(rows, dtype=torch.int64)
    dtype = sums[0].grads.dtype
    _kernel[(blocks,)](
        table.to(out.device, non_blocking=True),
        excluded.view(torch.uint8),
        out,
        stride,
        len(rows),
        COUNT=triton.next_power_of_2(len(rows)),
        DTYPE=TYPES[dtype],
        WIDE=tl.float64 if dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
