"""Triton kernels that test whether norms by Gram matrices are reliable, and recompute the others.

Where terms of both signs have cancelled, their sum consists of rounding errors: the norm
of such a sample is computed from tiles of ``A^T G``, as in ``width``. The device decides,
so that nothing waits for it; programs of other samples end at once. Letters: B samples, T tokens,
d and p features, S partial sums.
"""

# Kernels have no annotations but Triton's own: it evaluates them when it compiles.

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.host.operands import Group, Tile
from opacus.core.kernels.host.triton_host import TYPES, address, number, own_rows
from opacus.core.kernels.norms.trusted import TRUSTED
from opacus.core.kernels.norms.width import (
    COLUMNS,
    TILE_HALF,
    TILE_WIDE,
    place_of,
    plan_of,
    square_of_tile,
    table_of,
)

logger = logging.getLogger(__name__)

# Programs for each multiprocessor: all work where one sample is mended.
PROGRAMS = 4
# Partial sums that are read at once.
SLOTS = 64


@triton.jit  # type: ignore[untyped-decorator]
def judge(sums, sizes, slots, TRUSTED: tl.constexpr, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """A sample's sum, and whether it can be trusted: not if it is zero or not finite."""
    places = tl.arange(0, SLOTS)
    total = tl.zeros((SLOTS,), dtype=tl.float32)
    size = tl.zeros((SLOTS,), dtype=tl.float32)
    for start in range(0, slots, SLOTS):
        inside = places < slots - start
        total += tl.load(sums + start + places, mask=inside, other=0.0)
        size += tl.load(sizes + start + places, mask=inside, other=0.0)
    value = tl.sum(total, 0)
    return value, value > tl.sum(size, 0) * TRUSTED


@triton.jit  # type: ignore[untyped-decorator]
def _settled(  # type: ignore[no-untyped-def]
    sums, sizes, slots, program, programs,
    a, g, weights, tokens, d, p, a_t, a_d, g_t, g_d, weights_t,
    TRUSTED: tl.constexpr, SLOTS: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """This program's part of one sample's squared norm."""
    total, trusted = judge(sums, sizes, slots, TRUSTED, SLOTS)
    m_tiles, n_tiles = tl.cdiv(d, M), tl.cdiv(p, N)
    value = tl.where(trusted & (program == 0), total, 0.0)
    for tile in range(program, tl.where(trusted, 0, m_tiles * n_tiles), programs):
        m, n = place_of(tile, m_tiles, n_tiles, GROUP)
        value += square_of_tile(
            a, g, weights, tokens, d, p, a_t, a_d, g_t, g_d, weights_t, m, n,
            MASK, WHOLE, M, N, K, STAGES, WIDEN,
        )  # fmt: skip
    return value


@triton.jit(do_not_specialize=["tokens", "d", "p", "slots"])  # type: ignore[untyped-decorator]
def _pair_kernel(  # type: ignore[no-untyped-def]
    a, g, weights, sums, sizes, out, tokens, d, p, slots,
    a_b, a_t, a_d, g_b, g_t, g_d, weights_b, weights_t,
    TRUSTED: tl.constexpr, SLOTS: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One layer, ``[programs, B]``."""
    program, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    value = _settled(
        sums + sample * slots, sizes + sample * slots, slots, program, tl.num_programs(0),
        a + sample * a_b, g + sample * g_b, weights + sample * weights_b, tokens,
        tl.multiple_of(d, WHOLE), tl.multiple_of(p, WHOLE),
        a_t, a_d, g_t, g_d, weights_t,
        TRUSTED, SLOTS, MASK, WHOLE, M, N, K, GROUP, STAGES, WIDEN,
    )  # fmt: skip
    tl.store(out + sample * tl.num_programs(0) + program, value)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["samples", "slots", "programs"]
)
def _table_kernel(  # type: ignore[no-untyped-def]
    table, partial, out, samples, slots, programs,
    TYPE: tl.constexpr, COLUMNS: tl.constexpr,
    TRUSTED: tl.constexpr, SLOTS: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Many layers, ``[B programs, layers]``; the table is that of ``width``."""
    sample = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    layer = tl.program_id(1).to(tl.int64)
    row = table + layer * COLUMNS
    # Layers with fewer samples than the largest leave some programs without work.
    there = sample < tl.load(row + 3)
    tokens = tl.where(there, tl.load(row + 4).to(tl.int32), 0)
    d = tl.multiple_of(tl.where(there, tl.load(row + 5).to(tl.int32), 0), WHOLE)
    p = tl.multiple_of(tl.load(row + 6).to(tl.int32), WHOLE)
    a = address(row, TYPE, WHOLE) + sample * number(row, 7, WHOLE)
    g = address(row + 1, TYPE, WHOLE) + sample * number(row, 10, WHOLE)
    weights = a
    if MASK is not None:
        weights = tl.load(row + 2).to(tl.pointer_type(MASK)) + sample * tl.load(row + 13)
    place = layer * samples + sample
    sums = partial + place * slots
    sizes = sums + tl.num_programs(1).to(tl.int64) * samples * slots
    value = _settled(
        sums, sizes, slots, program, programs, a, g, weights, tokens, d, p,
        number(row, 8, WHOLE), tl.load(row + 9), number(row, 11, WHOLE), tl.load(row + 12),
        tl.load(row + 14),
        TRUSTED, SLOTS, MASK, WHOLE, M, N, K, GROUP, STAGES, WIDEN,
    )  # fmt: skip
    tl.store(out + place * programs + program, value)


def settle(a: Tensor, g: Tensor, mask: Tensor | None, partial: Tensor) -> Tensor:
    """The norms by Gram matrices where they can be trusted, the others computed directly.

    Args:
        a: ``[B, T, d]``, bf16, fp16 or fp32, any strides; not empty.
        g: ``[B, T, p]`` of the same dtype.
        mask: ``[B, T]`` as from :func:`operands.check_mask`.
        partial: ``[2, B, ...]`` parts of the sums of the products of both Gram matrices'
            elements, and of the sums of their absolute values.

    Returns:
        ``[B]`` in fp32.
    """
    (batch, tokens, d), p = a.shape, g.shape[2]
    weights = None if mask is None else mask.dtype
    known = (a.shape, g.shape, a.stride(), g.stride(), a.dtype, weights)
    programs, whole, tile = _pair_plan(*known, operands.multiprocessors(a.device))
    aligned = whole > 1 and operands.all_aligned((a.data_ptr(), g.data_ptr()))
    sums, sizes = partial.view(2, batch, -1).unbind()
    out = operands.blank((batch, programs), a.device)
    _pair_variant(weights, whole if aligned else 1, tile)(
        (programs, batch), a, g, a if mask is None else mask, sums, sizes, out,
        tokens, d, p, sums.shape[1], *a.stride(), *g.stride(),
        *(operands.NO_STRIDES if mask is None else mask.stride()),
    )  # fmt: skip
    return out.sum(1)


@functools.lru_cache(maxsize=4096)
def _pair_plan(
    a: torch.Size,
    g: torch.Size,
    a_strides: tuple[int, ...],
    g_strides: tuple[int, ...],
    dtype: torch.dtype,
    weights: torch.dtype | None,
    processors: int,
) -> tuple[int, int, Tile]:
    """Programs for a sample, what sizes and strides are multiples of, and the kernel's variant."""
    tile = TILE_WIDE if torch.float32 in (dtype, weights) else TILE_HALF
    tile = tile.fitted(a[2], g[2])
    tiles = operands.parts(a[2], tile.m) * operands.parts(g[2], tile.n)
    programs = max(1, min(tiles, PROGRAMS * processors // a[0]))
    return programs, operands.whole_of((a, g), (a_strides, g_strides), dtype), tile


def settle_all(pairs: Sequence[tuple[Tensor, Tensor]], partial: Tensor) -> list[Tensor]:
    """:func:`settle` of layers of one dtype; ``partial [2, layers, B, S]``."""
    if len(pairs) == 1:  # without a table
        return [settle(*pairs[0], None, partial)]
    return settle_group(operands.checked_group(pairs, None), partial)


def settle_group(group: Group, partial: Tensor) -> list[Tensor]:
    """:func:`settle` of many layers in one launch; ``partial [2, layers, most samples, S]``."""
    first, plan = group.tensors[0], plan_of(group)
    table, whole = table_of(group, plan)
    _, layers, samples, slots = partial.shape
    busy = PROGRAMS * operands.multiprocessors(first.device)
    programs = max(1, min(plan.slots, busy // (layers * samples)))
    out = operands.blank((layers, samples, programs), first.device)
    _table_variant(first.dtype, group.mask_dtype, whole, plan.tile)(
        (samples * programs, layers), table, partial, out, samples, slots, programs
    )
    return own_rows(out.sum(2), plan.sizes)


def _constants(weights: torch.dtype | None, whole: int, tile: Tile) -> dict[str, object]:
    return {
        "TRUSTED": TRUSTED,
        "SLOTS": SLOTS,
        "MASK": None if weights is None else TYPES[weights],
        "WHOLE": whole,
        "M": tile.m,
        "N": tile.n,
        "K": tile.k,
        "GROUP": tile.group,
        "STAGES": tile.stages,
        "WIDEN": operands.interpreted(),
        "num_warps": tile.warps,
    }


@functools.lru_cache(maxsize=256)
def _pair_variant(weights: torch.dtype | None, whole: int, tile: Tile) -> Variant:
    return Variant(_pair_kernel, **_constants(weights, whole, tile))


@functools.lru_cache(maxsize=256)
def _table_variant(
    dtype: torch.dtype, weights: torch.dtype | None, whole: int, tile: Tile
) -> Variant:
    constants = _constants(weights, whole, tile)
    return Variant(_table_kernel, TYPE=TYPES[dtype], COLUMNS=COLUMNS, **constants)


def works(device: torch.device) -> bool:
    """Whether Triton compiles and runs :func:`settle_all` on this device.

    Trying it waits for the device, which a graph that is being captured cannot.
    """
    return not torch.cuda.is_current_stream_capturing() and _works(device)


@functools.cache
def _works(device: torch.device) -> bool:
    a = torch.tensor([[[1.0], [1.0]], [[1.0], [-1.0]]], device=device)  # [2, 2, 1]
    pair, partial = (a, torch.ones_like(a)), torch.tensor([[5.0, 5.0], [5.0, 1e6]], device=device)
    two = partial[:, None, :, None].repeat(1, 2, 1, 1)
    try:
        norms = [settle(*pair, None, partial), *settle_all([pair, pair], two)]
        return [n.tolist() for n in norms] == [[5.0, 0.0]] * 3
    except Exception as error:  # whatever a compiler or a driver raises
        logger.warning("norms are computed without Gram matrices: Triton fails with %s", error)
        return False
