"""GPU kernels for squared norms of the rows of many tensors, in two launches.

The definition is :func:`opacus.core.kernels.norms.reference.sum_of_squares`. Each program squares
and adds up a part of a row, and writes one number; then one program for each row adds up those of
its parts. The order is always the same, and so is the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.host.triton_host import TYPES, row_of

# Elements that are handled at once.
BLOCK = 2048
# Blocks that one program handles: finding its row of the table takes longer than one of them.
LOOPS = 16
# First program, address, elements of a row, parts of a row, whether rows lie at 16 bytes.
COLUMNS = 5
# First row, first of its parts, parts of a row.
TOTAL_COLUMNS = 3
# Rows shorter than this are left to PyTorch, unless they are so few.
SHORT, FEW = 256, 8
# Parts that are added up at once.
TOTAL_BLOCK = 512


@triton.jit
def _squares(source, left, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Sum of squares of ``left`` elements, a multiple of WHOLE, of 16 bytes if that is not 1."""
    source = source.to(tl.pointer_type(DTYPE))
    if WHOLE > 1:
        source, left = tl.multiple_of(source, 16), tl.multiple_of(left, WHOLE)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, left, BLOCK):
        places = offset + tl.arange(0, BLOCK)
        value = tl.load(source + places, mask=places < left, other=0.0).to(tl.float32)
        total += value * value
    return tl.sum(total, 0)


@triton.jit
def _parts(
    table,
    out,
    count,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """WHOLE: elements of 16 bytes, of which some tensors have whole ones only."""
    program = tl.program_id(0).to(tl.int64)
    entry = row_of(program, table, count, COUNT, COLUMNS)
    size, parts, own = tl.load(entry + 2), tl.load(entry + 3), program - tl.load(entry)
    begin = own % parts * (BLOCK * LOOPS)
    source = tl.load(entry + 1) + (own // parts * size + begin) * BYTES
    left = tl.minimum(size - begin, BLOCK * LOOPS).to(tl.int32)
    if tl.load(entry + 4) != 0:
        tl.store(out + program, _squares(source, left, DTYPE, BLOCK, WHOLE))
    else:
        tl.store(out + program, _squares(source, left, DTYPE, BLOCK, 1))


@triton.jit
def _totals(
    table,
    parts,
    out,
    count,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entry = row_of(row, table, count, COUNT, COLUMNS)
    many = tl.load(entry + 2)
    parts += tl.load(entry + 1) + (row - tl.load(entry)) * many
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, many.to(tl.int32), BLOCK):
        places = offset + tl.arange(0, BLOCK)
        total += tl.load(parts + places, mask=places < many, other=0.0)
    tl.store(out + row, tl.sum(total, 0))


def squares_of(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Squared norms ``[B]`` of the rows of each ``[B, *shape]``, in fp32.

    Returns:
        ``None`` where these kernels are not for all of them: not for fp64, for tensors that are not
        contiguous or on one device, and for many short rows, which would have a program each.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    device = tensors[0].device
    for place, tensor in enumerate(tensors):
        rows, size = tensor.shape[0], tensor.numel()
        if not (size and tensor.is_contiguous() and tensor.device == device):
            return None
        if size < rows * SHORT and rows > FEW:
            return None
        by_dtype.setdefault(tensor.dtype, []).append(place)
    if not by_dtype.keys() <= set(operands.SUPPORTED):
        return None
    found: dict[int, Tensor] = {}
    for places in by_dtype.values():
        own = [tensors[place] for place in places]
        counts = [tensor.shape[0] for tensor in own]
        found |= zip(places, launch(own, counts).split(counts), strict=True)
    return [found[place] for place in range(len(tensors))]


def squares_of_wholes(tensors: Sequence[Tensor]) -> Tensor | None:
    """``[n]`` squared norms of whole tensors in fp32, the same numbers in each call.

    Returns:
        ``None`` if these are not contiguous, of one dtype that the kernels know, on one device.
    """
    first, elements = tensors[0], 0
    alike = first.dtype in operands.SUPPORTED
    for tensor in tensors if alike else ():
        elements += tensor.numel()
        same = tensor.dtype == first.dtype and tensor.device == first.device
        alike = alike and same and tensor.is_contiguous()
    return launch(tensors, [1] * len(tensors)) if alike and elements else None


def launch(tensors: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Squared norms of all rows, one tensor's after the other's.

    Args:
        tensors: Contiguous, not all empty, of one dtype and on one device.
        rows: How many equal rows each is cut into; at least 1.

    Returns:
        ``[sum(rows)]`` in fp32.
    """
    table: list[int] = []
    of_rows: list[int] = []
    programs, every, whole = 0, 0, operands.ALIGNMENT // tensors[0].element_size()
    for tensor, count in zip(tensors, rows, strict=True):
        size, place = tensor.numel() // count, tensor.data_ptr()
        parts = -(-size // (BLOCK * LOOPS))
        aligned = not (place % operands.ALIGNMENT or size % whole)
        table += (programs, place, size, parts, int(aligned))
        of_rows += (every, programs, parts)
        programs, every = programs + count * parts, every + count
    first = tensors[0]
    numbers = operands.upload([*table, *of_rows], first.device)
    own = operands.blank((programs,), first.device)
    totals = operands.blank((every,), first.device)
    count = operands.power_of_two(len(tensors))
    _variant(count, first.dtype)((programs,), numbers, own, len(tensors))
    _total_variant(count)((every,), numbers[len(table) :], own, totals, len(tensors))
    return totals


@functools.lru_cache(maxsize=256)
def _variant(count: int, dtype: torch.dtype) -> Variant:
    return Variant(
        _parts,
        COUNT=count,
        DTYPE=TYPES[dtype],
        BLOCK=BLOCK,
        LOOPS=LOOPS,
        COLUMNS=COLUMNS,
        WHOLE=operands.ALIGNMENT // dtype.itemsize,
        BYTES=dtype.itemsize,
        num_warps=8,
    )


@functools.lru_cache(maxsize=256)
def _total_variant(count: int) -> Variant:
    return Variant(
        _totals,
        COUNT=count,
        BLOCK=TOTAL_BLOCK,
        COLUMNS=TOTAL_COLUMNS,
        num_warps=4,
    )
