"""Triton kernel that sums the terms of Gram matrices' products without writing them down."""

# Kernels have no annotations but Triton's own: it evaluates them when it compiles.

from __future__ import annotations

import functools
from collections.abc import Sequence

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant

# Elements that are handled at once, and how often a program does.
BLOCK = 2048
LOOPS = 8


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["batch", "columns", "once", "starts"]
)
def _kernel(  # type: ignore[no-untyped-def]
    left, right, sums, sizes, size, batch, columns, once, starts,
    TWICE: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """A part of one sample's terms, ``[slots, B, layers]``. TWICE: some columns count twice."""
    slot, sample, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shared = sample.to(tl.int64)
    for other in range(1, layer + 1):
        shared += ((starts >> other) & 1) * batch
    own = layer.to(tl.int64) * batch + sample
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    absolute = tl.zeros((BLOCK,), dtype=tl.float32)
    for loop in range(LOOPS):
        places = (slot * LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)
        inside = places < size
        term = tl.load(left + shared * size + places, mask=inside, other=0.0)
        term *= tl.load(right + own * size + places, mask=inside, other=0.0)
        if TWICE:
            term = tl.where(places % columns < once, term, 2.0 * term)
        total += term
        absolute += tl.abs(term)
    place = own * tl.num_programs(0) + slot
    tl.store(sums + place, tl.sum(total, 0))
    tl.store(sizes + place, tl.sum(absolute, 0))


def sums_and_sizes(left: Tensor, right: Tensor, inputs: Sequence[int], once: int) -> Tensor:
    """Parts of the sums of each sample's terms, and of their absolute values; of several layers.

    Args:
        left: ``[I, B, t, s]``, fp32, contiguous, less than 2^31 elements a sample; not empty.
        right: ``[L, B, t, s]``, the same; the terms are its elements times those of ``left``.
        inputs: Which of ``left`` belongs to each layer, at most ``MOST_STACKED``: each is that of
            the layer before or the next one.
        once: Columns that count once; the others count twice.

    Returns:
        ``[2, L, B, S]``.
    """
    layers, batch, rows, columns = right.shape
    size = rows * columns
    slots = operands.parts(size, BLOCK * LOOPS)
    both = operands.blank((2, layers, batch, slots), left.device)
    starts = sum((inputs[i] - inputs[i - 1]) << i for i in range(1, layers))  # a bit for each layer
    _variant(once < columns)(
        (slots, batch, layers), left, right, *both.unbind(), size, batch, columns, once, starts
    )
    return both


@functools.cache
def _variant(twice: bool) -> Variant:
    return Variant(_kernel, TWICE=twice, BLOCK=BLOCK, LOOPS=LOOPS, num_warps=4)
