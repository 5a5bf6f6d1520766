"""Triton kernel that sums the terms of Gram matrices' products without writing them down."""

# Kernels have no annotations but Triton's own: it evaluates them when it compiles.

from __future__ import annotations

import functools

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant

# Elements that are handled at once, and how often a program does.
BLOCK = 2048
LOOPS = 8


@triton.jit(do_not_specialize=["size", "columns", "once"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    left, right, sums, sizes, size, columns, once, BLOCK: tl.constexpr, LOOPS: tl.constexpr
):  # fmt: skip
    """A part of one sample's terms, ``[slots, B]``."""
    slot, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    absolute = tl.zeros((BLOCK,), dtype=tl.float32)
    for loop in range(LOOPS):
        places = (slot * LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)
        inside = places < size
        term = tl.load(left + sample * size + places, mask=inside, other=0.0)
        term *= tl.load(right + sample * size + places, mask=inside, other=0.0)
        term = tl.where(places % columns < once, term, 2.0 * term)
        total += term
        absolute += tl.abs(term)
    place = sample * tl.num_programs(0) + slot
    tl.store(sums + place, tl.sum(total, 0))
    tl.store(sizes + place, tl.sum(absolute, 0))


def sums_and_sizes(left: Tensor, right: Tensor, once: int) -> Tensor:
    """Parts of the sums of each sample's terms, and of their absolute values.

    Args:
        left: ``[B, t, s]``, fp32, contiguous, less than 2^31 elements a sample; not empty.
        right: The same; the terms are its elements times those of ``left``.
        once: Columns that count once; the others count twice.

    Returns:
        ``[2, B, S]``.
    """
    batch, rows, columns = left.shape
    size = rows * columns
    slots = operands.parts(size, BLOCK * LOOPS)
    both = operands.blank((2, batch, slots), left.device)
    _variant()((slots, batch), left, right, *both.unbind(), size, columns, once)
    return both


@functools.cache
def _variant() -> Variant:
    return Variant(_kernel, BLOCK=BLOCK, LOOPS=LOOPS, num_warps=4)
