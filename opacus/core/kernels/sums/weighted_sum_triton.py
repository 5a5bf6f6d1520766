"""GPU kernel of :mod:`opacus.core.kernels.sums.weighted_sum`: many sums in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.host.triton_host import TYPES, row_of

BLOCK = 2048
# Blocks that one program handles: finding its row of the table takes longer than one of them.
LOOPS = 16
COLUMNS = 7


@triton.jit
def _kernel(
    table,
    excluded,
    out,
    out_stride,
    count,
    COUNT: tl.constexpr,
    HAS_EXCLUDED: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    PLACE: tl.constexpr,
):
    """WHOLE divides all sizes, segments and starts; PLACE is an integer type for positions."""
    program = tl.program_id(0).to(tl.int64)
    entry = row_of(program, table, count, COUNT, COLUMNS)
    first = tl.load(entry)
    grads = tl.load(entry + 1).to(tl.pointer_type(DTYPE))
    factors = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    size = tl.multiple_of(tl.load(entry + 3).to(PLACE), WHOLE)
    segment = tl.multiple_of(tl.load(entry + 4).to(PLACE), WHOLE)
    out += tl.multiple_of(tl.load(entry + 5), WHOLE)
    rows = tl.load(entry + 6)
    if WHOLE > 1:
        grads = tl.multiple_of(grads, 16)

    begin = ((program - first) * (BLOCK * LOOPS)).to(PLACE)
    for offset in range(0, tl.minimum(size - begin, BLOCK * LOOPS).to(tl.int32), BLOCK):
        places = begin + offset + tl.arange(0, BLOCK)
        inside = places < size
        total = tl.zeros((BLOCK,), dtype=WIDE)
        for row in range(rows):
            factor = tl.load(factors + row).to(WIDE)
            own = grads + tl.cast(row, tl.int64) * size
            value = tl.load(own + places, mask=inside, other=0.0).to(WIDE) * factor
            if HAS_EXCLUDED:
                skip = tl.load(excluded + row) != 0
                value = tl.where(skip, 0.0, value)
            total += value
        # The result may be cut into segments that lie ``out_stride`` apart.
        target = out + (places // segment).to(tl.int64) * out_stride + places % segment
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)


class Sum(NamedTuple):
    """One weighted sum of a launch.

    Attributes:
        grads: ``[B, *shape]``, contiguous; the dtype is the same in all of a launch.
        factors: ``[B]``, fp32.
        start: Where in ``out`` its first element goes.
        segment: Number of contiguous elements there; the next segment starts one stride later.
    """

    grads: Tensor
    factors: Tensor
    start: int
    segment: int


def launch(sums: Sequence[Sum], excluded: Tensor | None, out: Tensor, stride: int) -> None:
    """Write all weighted sums into ``out``.

    Args:
        sums: Gradients to sum, and where each sum goes.
        excluded: ``[B]`` bool; these rows contribute nothing. ``None``: there are none.
        out: The storage that is written to.
        stride: Elements between a segment and the next.
    """
    sums = [s for s in sums if s.grads.numel()]
    if not sums:
        return
    rows: list[int] = []
    programs, largest, everywhere, sizes = 0, 0, out.data_ptr(), stride
    for grads, factors, start, segment in sums:
        count = grads.shape[0]
        size, place = grads.numel() // count, grads.data_ptr()
        rows += (programs, place, factors.data_ptr(), size, segment, start, count)
        programs -= -size // (BLOCK * LOOPS)
        largest = max(largest, size)
        # Bits set in any address or number of elements.
        everywhere |= place
        sizes |= size | start | segment
    dtype = sums[0].grads.dtype
    whole = operands.ALIGNMENT // dtype.itemsize
    if everywhere % operands.ALIGNMENT or sizes % whole:
        whole = 1
    count, masked = operands.power_of_two(len(sums)), excluded is not None
    _variant(count, masked, dtype, whole, largest < 1 << 30)(
        (programs,),
        operands.upload(rows, out.device),
        out if excluded is None else excluded.view(torch.uint8),
        out,
        stride,
        len(sums),
    )


@functools.lru_cache(maxsize=256)
def _variant(count: int, masked: bool, dtype: torch.dtype, whole: int, short: bool) -> Variant:
    return Variant(
        _kernel,
        COUNT=count,
        HAS_EXCLUDED=masked,
        DTYPE=TYPES[dtype],
        WIDE=tl.float64 if dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK,
        LOOPS=LOOPS,
        COLUMNS=COLUMNS,
        WHOLE=whole,
        PLACE=tl.int32 if short else tl.int64,
        num_warps=8,
    )
