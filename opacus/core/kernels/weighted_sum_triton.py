"""GPU kernel of :mod:`opacus.core.kernels.weighted_sum`: many sums in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels import operands
from opacus.core.kernels.triton_host import TYPES, row_of

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
            skip = tl.load(excluded + row) != 0
            own = grads + tl.cast(row, tl.int64) * size
            value = tl.load(own + places, mask=inside, other=0.0)
            total += tl.where(skip, 0.0, value.to(WIDE) * factor)
        # The result may be cut into segments that lie ``out_stride`` apart.
        target = out + (places // segment).to(tl.int64) * out_stride + places % segment
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
    rows, programs = [], 0
    for s in sums:
        size = s.grads[0].numel()
        rows.append(
            (
                programs,
                s.grads.data_ptr(),
                s.factors.data_ptr(),
                size,
                s.segment,
                s.start,
                len(s.grads),
            )
        )
        programs += operands.parts(size, BLOCK * LOOPS)
    dtype = sums[0].grads.dtype
    aligned = _is_aligned(sums, out, stride)
    _kernel[(programs,)](
        operands.upload(itertools.chain.from_iterable(rows), out.device),
        excluded.view(torch.uint8),
        out,
        stride,
        len(rows),
        COUNT=triton.next_power_of_2(len(rows)),
        DTYPE=TYPES[dtype],
        WIDE=tl.float64 if dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK,
        LOOPS=LOOPS,
        WHOLE=operands.ALIGNMENT // dtype.itemsize if aligned else 1,
        PLACE=tl.int32 if max(s.grads[0].numel() for s in sums) < 1 << 30 else tl.int64,
        COLUMNS=COLUMNS,
        num_warps=8,
    )


def _is_aligned(sums: Sequence[Sum], out: Tensor, stride: int) -> bool:
    """Whether 16 bytes can be read and written at once, throughout."""
    whole = operands.ALIGNMENT // sums[0].grads.element_size()
    numbers = (n for s in sums for n in (s.grads[0].numel(), s.start, s.segment))
    places = (out.data_ptr(), *(s.grads.data_ptr() for s in sums))
    return (
        stride % whole == 0
        and all(n % whole == 0 for n in numbers)
        and all(place % operands.ALIGNMENT == 0 for place in places)
    )
