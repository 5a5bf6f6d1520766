"""GPU kernel of :mod:`opacus.core.kernels.noise.gaussian`: noise for many tensors in one launch."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.host.triton_host import TYPES, address, row_of
from opacus.core.kernels.noise import chacha, philox
from opacus.core.kernels.noise.chacha_triton import chacha20

if TYPE_CHECKING:
    from opacus.core.kernels.noise.draw import Draw

# Elements that are handled at once.
BLOCK = 2048
# Blocks that one program handles: finding its row of the table takes longer than one of them.
LOOPS = 16
# First program, source, target, elements; number of the first, step, width, pitch; key.
COLUMNS = 12
# Of an earlier step that is added: its number, the bits of its weight in fp32, its key.
PAST_COLUMNS = 6


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
def _four(a, b, c, d, FAST: tl.constexpr):
    """``[N, 2, 2]``: four numbers of each row, in order."""
    z0, z1 = _normal_pair(a, b, FAST)
    z2, z3 = _normal_pair(c, d, FAST)
    return tl.join(tl.join(z0, z2), tl.join(z1, z3))


@triton.jit
def _philox_normals(counters, step, key, FAST: tl.constexpr):
    """``[N, 4]`` numbers of the counters ``[N]``; ``key`` points to its row of the table."""
    low, high = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
    zero = low * 0
    late, later = zero + step.to(tl.uint32), zero + (step >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(key), low, high, late, later)
    return _four(a, b, c, d, FAST)


@triton.jit
def _chacha_normals(counters, step, key, FAST: tl.constexpr):
    """``[N, 16]`` numbers of the counters ``[N]``."""
    low, high = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
    zero = low * 0
    late, later = zero + step.to(tl.uint32), zero + (step >> 32).to(tl.uint32)
    w = chacha20(low, high, late, later, key)
    # join() adds the last dimension: sets of four are told by the two that are added last.
    q0, q1 = _four(w[0], w[1], w[2], w[3], FAST), _four(w[4], w[5], w[6], w[7], FAST)
    q2, q3 = _four(w[8], w[9], w[10], w[11], FAST), _four(w[12], w[13], w[14], w[15], FAST)
    return tl.permute(tl.join(tl.join(q0, q2), tl.join(q1, q3)), (0, 3, 4, 1, 2))


@triton.jit
def _kernel(
    table,
    std,
    grid,
    share,
    count,
    COUNT: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
    SECURE: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROUND: tl.constexpr,
    PAST: tl.constexpr,
    PAST_COLUMNS: tl.constexpr,
):
    """One counter makes ``LANES`` numbers, of elements whose numbers differ in the last bits.

    ROWS: a tensor's rows have gaps between them, and each starts a counter of its own.
    WHOLE divides all sizes; above 1 each tensor starts with a counter.
    PAST: how many earlier steps' noise is added, too.
    ``share`` is what the sum is multiplied by at last.
    """
    program = tl.program_id(0).to(tl.int64)
    entry = row_of(program, table, count, COUNT, COLUMNS)
    source, target = address(entry + 1, SOURCE, WHOLE), address(entry + 2, TARGET, WHOLE)
    size = tl.multiple_of(tl.load(entry + 3), WHOLE)
    first, step = tl.load(entry + 4), tl.load(entry + 5)
    width, pitch = tl.load(entry + 6), tl.load(entry + 7)
    begin = (program - tl.load(entry)) * (BLOCK // LANES * LOOPS)
    a_row = (width + 2 * LANES - 2) // LANES  # counters that a row may touch
    every = size // width * a_row if ROWS else (first % LANES + size + LANES - 1) // LANES
    end = tl.minimum(every - begin, BLOCK // LANES * LOOPS).to(tl.int32)
    for offset in range(0, end, BLOCK // LANES):
        units = begin + offset + tl.arange(0, BLOCK // LANES)
        if ROWS:
            row = units // a_row
            start = first + row * pitch
            counters = start // LANES + units % a_row
            columns = (counters * LANES - start)[:, None] + tl.arange(0, LANES)[None, :]
            places = row[:, None] * width + columns
            inside = (columns >= 0) & (columns < width) & (places < size)
            places = tl.reshape(places, (BLOCK,))
            inside = tl.reshape(inside, (BLOCK,))
        else:
            counters = first // LANES + units
            places = (begin + offset) * LANES + tl.arange(0, BLOCK)
            if WHOLE == 1:
                places -= first % LANES
            inside = (places >= 0) & (places < size)
        if SECURE:
            noise = _chacha_normals(counters, step, entry + 8, FAST)
        else:
            noise = _philox_normals(counters, step, entry + 8, FAST)
        for number in range(PAST):
            earlier = entry + (COLUMNS - PAST * PAST_COLUMNS) + number * PAST_COLUMNS
            weight = tl.load(earlier + 1).to(tl.int32).to(tl.float32, bitcast=True)
            if SECURE:
                again = _chacha_normals(counters, tl.load(earlier), earlier + 2, FAST)
            else:
                again = _philox_normals(counters, tl.load(earlier), earlier + 2, FAST)
            noise += weight * again
        value = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        value += std * tl.reshape(noise, (BLOCK,))
        if ROUND:
            value = tl.floor(value / grid + 0.5) * grid
        tl.store(target + places, (value * share).to(TARGET), mask=inside)


def launch(
    std: float,
    draws: Sequence[Draw],
    step: int,
    grid: float = 0.0,
    past: Sequence[tuple[float, int]] = (),
    secure: bool = False,
    divisor: float = 1.0,
) -> None:
    """Write ``(source + std * noise) / divisor`` to each target.

    Args:
        std: Standard deviation.
        draws: On one GPU; the sources have one dtype, and so have the targets.
        step: See :func:`opacus.core.kernels.noise.gaussian.add_gaussian`.
        grid: Results are rounded to multiples of it; 0: no rounding.
        past: Weights and numbers of earlier steps whose noise is added.
        secure: ChaCha20 instead of Philox.
        divisor: Of the sum with its noise, once that is rounded.
    """
    draws = [draw for draw in draws if draw.region.size]
    with_gaps = [draw for draw in draws if draw.region.width < draw.region.size]
    without = [draw for draw in draws if draw.region.width == draw.region.size]
    for group, has_rows in ((without, False), (with_gaps, True)):
        if group:
            _launch(std, group, step, grid, has_rows, past, secure, divisor)


def _launch(
    std: float,
    draws: Sequence[Draw],
    step: int,
    grid: float,
    has_rows: bool,
    past: Sequence[tuple[float, int]],
    secure: bool,
    divisor: float,
) -> None:
    lanes = chacha.LANES if secure else philox.LANES
    rows: list[int] = []
    programs, every = 0, 0
    weights = [struct.unpack("<i", struct.pack("<f", weight))[0] for weight, _ in past]
    for source, target, region, key, earlier in draws:
        places = source.data_ptr(), target.data_ptr()
        rows += (programs, *places, region.size, region.first, step, region.width, region.pitch)
        rows += _numbers(key)
        for (_, number), weight, old in zip(past, weights, earlier, strict=True) if past else ():
            rows += (number, weight, *_numbers(old))
        # Bits set in any address, in twice any size, or in any first number.
        every |= places[0] | places[1] | 2 * region.size | region.first
        programs -= -_counters(region, lanes) // (BLOCK // lanes * LOOPS)
    whole = 8 if every % operands.ALIGNMENT == 0 and not has_rows else 1
    first = draws[0]
    _variant(
        operands.power_of_two(len(draws)), first.source.dtype, first.target.dtype, lanes,
        has_rows, whole, grid > 0, len(past),
    )(
        (programs,),
        operands.upload(rows, first.source.device),
        float(std),
        float(grid),
        1.0 / divisor,
        len(draws),
    )  # fmt: skip


def _counters(region, lanes: int) -> int:
    """How many counters the kernel uses for a region, at most."""
    if region.width < region.size:
        return region.size // region.width * ((region.width + 2 * lanes - 2) // lanes)
    return (region.first % lanes + region.size + lanes - 1) // lanes


@functools.lru_cache(maxsize=1 << 14)
def _numbers(key: bytes) -> tuple[int, ...]:
    return struct.unpack("<4q", key)


@functools.lru_cache(maxsize=256)
def _variant(
    count: int,
    source: torch.dtype,
    target: torch.dtype,
    lanes: int,
    has_rows: bool,
    whole: int,
    rounds: bool,
    past: int,
) -> Variant:
    return Variant(
        _kernel,
        COUNT=count,
        SOURCE=TYPES[source],
        TARGET=TYPES[target],
        BLOCK=BLOCK,
        LOOPS=LOOPS,
        COLUMNS=COLUMNS + past * PAST_COLUMNS,
        LANES=lanes,
        FAST=not operands.interpreted(),
        SECURE=lanes == chacha.LANES,
        ROWS=has_rows,
        WHOLE=whole,
        ROUND=rounds,
        PAST=past,
        PAST_COLUMNS=PAST_COLUMNS,
        num_warps=4,
    )
