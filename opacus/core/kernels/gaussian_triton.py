"""GPU kernel of :mod:`opacus.core.kernels.gaussian`: noise for many tensors in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from opacus.core.kernels import operands
from opacus.core.kernels.launch import Variant
from opacus.core.kernels.triton_host import TYPES, row_of

BLOCK = 2048
# Blocks that one program handles: finding its row of the table takes longer than one of them.
LOOPS = 16
COLUMNS = 4


@triton.jit
def _normal_pair(first, second, FAST: tl.constexpr):
    """Two standard normal numbers from two random words, by Box and Muller."""
    # In (0, 1]: the logarithm stays finite; the largest number is 6.8.
    uniform = (first.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt(-2.0 * tl.log(uniform))
    # Signed, so that the angle is precise around zero: -pi to pi.
    angle = second.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-9
    if FAST:  # to 2^-20 where the angle is within one turn; a tenth of the time
        return radius * libdevice.fast_cosf(angle), radius * libdevice.fast_sinf(angle)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _kernel(
    table,
    key,
    std,
    count,
    COUNT: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FAST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """WHOLE divides all sizes."""
    program = tl.program_id(0).to(tl.int64)
    entry = row_of(program, table, count, COUNT, COLUMNS)
    source = tl.load(entry + 1).to(tl.pointer_type(SOURCE))
    target = tl.load(entry + 2).to(tl.pointer_type(TARGET))
    size = tl.multiple_of(tl.load(entry + 3), WHOLE)
    if WHOLE > 1:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    own_key = tl.load(key)
    begin = (program - tl.load(entry)) * (BLOCK * LOOPS)
    for offset in range(0, tl.minimum(size - begin, BLOCK * LOOPS).to(tl.int32), BLOCK):
        # Philox: a counter that no other quadruple of this launch has, under the launch's key.
        quads = (program * (BLOCK * LOOPS) + offset) // 4 + tl.arange(0, BLOCK // 4)
        low, high = quads.to(tl.uint32), (quads >> 32).to(tl.uint32)
        zero = low * 0
        a, b, c, d = tl.philox(own_key, low, high, zero, zero)
        z0, z1 = _normal_pair(a, b, FAST)
        z2, z3 = _normal_pair(c, d, FAST)
        noise = tl.reshape(tl.join(tl.join(z0, z1), tl.join(z2, z3)), (BLOCK,))
        places = begin + offset + tl.arange(0, BLOCK)
        inside = places < size
        value = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + places, (value + std * noise).to(TARGET), mask=inside)


def launch(std: float, sources: Sequence[Tensor], targets: Sequence[Tensor], key: Tensor) -> None:
    """Write ``source + std * noise`` to each target.

    Args:
        std: Standard deviation.
        sources: Contiguous, one dtype.
        targets: Of the same sizes, contiguous, one dtype; may be the sources.
        key: int64 ``[1]`` on the device, another one for each launch.
    """
    rows: list[int] = []
    programs, every = 0, 0
    for source, target in zip(sources, targets, strict=True):
        size = source.numel()
        if size:
            own = (programs, source.data_ptr(), target.data_ptr(), size)
            rows += own
            # Bits that any of the addresses, or twice any of the sizes, has.
            every |= own[1] | own[2] | 2 * size
            programs -= -size // (BLOCK * LOOPS)
    if not rows:
        return
    count = len(rows) // COLUMNS
    types = sources[0].dtype, targets[0].dtype
    whole = 8 if every % operands.ALIGNMENT == 0 else 1
    _variant(operands.power_of_two(count), *types, whole)(
        (programs,),
        operands.upload(rows, key.device),
        key,
        float(std),
        count,
    )


@functools.lru_cache(maxsize=256)
def _variant(count: int, source: torch.dtype, target: torch.dtype, whole: int) -> Variant:
    return Variant(
        _kernel,
        COUNT=count,
        SOURCE=TYPES[source],
        TARGET=TYPES[target],
        BLOCK=BLOCK,
        LOOPS=LOOPS,
        COLUMNS=COLUMNS,
        FAST=not operands.interpreted(),
        WHOLE=whole,
        num_warps=8,
    )
