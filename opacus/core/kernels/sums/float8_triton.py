"""GPU kernel of :mod:`opacus.core.kernels.sums.float8`: reads once and writes once."""

from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.sums.coins import BYTES, LANE, TILE

# Tiles that one program handles.
LOOPS = 8


@triton.jit
def _kernel(
    grads,
    scales,
    finite,
    values,
    squares,
    table,
    size,
    tiles,
    LANE: tl.constexpr,
    BYTES: tl.constexpr,
    LOOPS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """``table`` holds the key and the number."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0).to(tl.int64)
    key, number = tl.load(table), tl.load(table + 1)
    scale, whole = tl.load(scales + row), tl.load(finite + row) != 0
    lanes = tl.arange(0, LANE)
    grads += row * size
    values += row * size
    total = tl.zeros((LANE,), dtype=tl.float32)
    for tile in range(group * LOOPS, tl.minimum(tiles, (group + 1) * LOOPS)):
        counters = (row * tiles + tile) * LANE + lanes
        low, high = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
        zero = low * 0
        late, later = zero + number.to(tl.uint32), zero + (number >> 32).to(tl.uint32)
        a, b, c, d = tl.philox(key, low, high, late, later)
        for j in tl.static_range(BYTES):
            word = a if j % 4 == 0 else (b if j % 4 == 1 else (c if j % 4 == 2 else d))
            coin = ((word >> (8 * (j // 4))) & 0xFF).to(tl.float32) / 256.0
            places = tile * (LANE * BYTES) + j * LANE + lanes
            inside = places < size
            value = tl.load(grads + places, mask=inside & whole, other=0.0).to(tl.float32)
            exact = tl.div_rn(value, scale)  # the ordinary division is only nearly right
            bits = exact.to(tl.int32, bitcast=True) & 0x7F800000
            step = tl.maximum(bits.to(tl.float32, bitcast=True), 0.015625) * 0.125
            near = tl.floor(tl.div_rn(exact, step) + coin) * step
            near = tl.minimum(tl.maximum(near, -LARGEST), LARGEST)
            total += tl.where(inside, near * near, 0.0)
            tl.store(values + places, near.to(values.dtype.element_ty), mask=inside)
    tl.store(squares + row * tl.num_programs(0) + group, tl.sum(total))


def launch(
    flat: Tensor, scales: Tensor, finite: Tensor, key: bytes, number: int
) -> tuple[Tensor, Tensor]:
    """Values ``[B, n]`` and the sums of their squares ``[B]``; arguments as of the reference."""
    rows, size = flat.shape
    tiles = operands.parts(size, TILE)
    programs = operands.parts(tiles, LOOPS)
    values = torch.empty(rows, size, dtype=operands.FLOAT8, device=flat.device)
    squares = torch.empty(rows, programs, dtype=torch.float32, device=flat.device)
    (low,) = struct.unpack("<q", key[:8])
    _variant()(
        (programs, rows),
        flat,
        scales,
        finite.view(torch.uint8),
        values,
        squares,
        operands.upload([low, number], flat.device),
        size,
        tiles,
    )
    return values, squares.sum(1)


@functools.cache
def _variant() -> Variant:
    return Variant(
        _kernel, LANE=LANE, BYTES=BYTES, LOOPS=LOOPS, LARGEST=operands.LARGEST, num_warps=4
    )
