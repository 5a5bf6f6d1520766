"""Triton kernels of ``||A_i^T G_i||_F^2``: tiles of the product are squared in registers.

The algorithm ``"width"``: ``2 B T d p`` operations, whatever the width of the layer the
memory is one number for each tile. Letters: B samples, T tokens, d and p features.
"""

# Kernels have no annotations but Triton's own: it evaluates them when it compiles.

from __future__ import annotations

import array
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.host.operands import Group, Tile, check_pair
from opacus.core.kernels.host.triton_host import (
    TYPES,
    address,
    descriptor,
    number,
    own_rows,
)
from opacus.core.kernels.norms.specialised import has_specialised

# For tensors that the copy engine can read. Several, because the best one depends on how
# many tiles there are; see opacus.core.kernels.norms.choice.
TILES = (
    Tile(128, 256, 64, warps=8, stages=3),
    Tile(128, 256, 64, warps=8, stages=4),
    Tile(128, 128, 64, warps=4, stages=4),
)
# For all others, and for many layers in one launch.
TILE_HALF = Tile(128, 128, 32, warps=8, stages=3, tma=False)
TILE_WIDE = Tile(64, 64, 16, warps=4, stages=2, tma=False)
# int64 numbers that describe a layer: addresses of A, G and the mask; B, T, d, p; strides
# of A (3), G (3) and the mask (2).
COLUMNS = 15


@triton.jit  # type: ignore[untyped-decorator]
def place_of(tile, m_tiles, n_tiles, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Row and column of a tile; neighbours share operands, which then stay in the cache."""
    band = GROUP * n_tiles
    first = (tile // band) * GROUP
    height = tl.maximum(tl.minimum(m_tiles - first, GROUP), 1)
    inside = tile % band
    return first + inside % height, inside // height


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "batch", "samples", "m_tiles", "n_tiles"]
)
def _tma_kernel(  # type: ignore[no-untyped-def]
    a_desc,
    g_desc,
    partial,
    tokens,
    batch,
    samples,
    m_tiles,
    n_tiles,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile for ``samples`` samples in turn: the pipeline never runs empty between them."""
    tile = tl.program_id(0)
    sample = tl.program_id(1) * samples
    samples = tl.minimum(samples, batch - sample)
    m, n = place_of(tile, m_tiles, n_tiles, GROUP)
    out = partial + sample.to(tl.int64) * (m_tiles * n_tiles) + tile
    steps = tl.cdiv(tokens, K)
    step = 0
    total = tl.zeros((M, N), dtype=tl.float32)
    for _ in tl.range(0, samples * steps, num_stages=STAGES):
        # What lies outside of the tensor is read as zero.
        a = a_desc.load([sample, step * K, m * M]).reshape(K, M)
        g = g_desc.load([sample, step * K, n * N]).reshape(K, N)
        if WIDEN:
            a, g = a.to(tl.float32), g.to(tl.float32)
        total = tl.dot(a.T, g, total)
        step += 1
        if step == steps:
            tl.store(out, tl.sum(tl.sum(total * total, 1), 0))
            total = tl.zeros((M, N), dtype=tl.float32)
            out += m_tiles * n_tiles
            sample += 1
            step = 0


@triton.jit  # type: ignore[untyped-decorator]
def square_of_tile(  # type: ignore[no-untyped-def]  # noqa: ANN201
    a, g, weights, tokens, d, p, a_t, a_d, g_t, g_d, weights_t, m, n,
    MASK: tl.constexpr, WHOLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sum of squares of one tile of one sample's product; any strides.

    MASK is ``None``, or the dtype of the weights. WHOLE is 1, or what sizes and strides are
    multiples of where rows are contiguous and aligned.
    """
    a_cols, g_cols = m * M + tl.arange(0, M), n * N + tl.arange(0, N)
    places = tl.arange(0, K)
    if WHOLE > 1:
        a_ptrs = a + places[:, None] * a_t + a_cols[None, :]
        g_ptrs = g + places[:, None] * g_t + g_cols[None, :]
    else:
        a_ptrs = a + places[:, None] * a_t + a_cols[None, :] * a_d
        g_ptrs = g + places[:, None] * g_t + g_cols[None, :] * g_d
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in tl.range(0, tokens, K, num_stages=STAGES):
        inside = (places < tokens - start)[:, None]
        x = tl.load(a_ptrs, mask=inside & (a_cols < d)[None, :], other=0.0)
        y = tl.load(g_ptrs, mask=inside & (g_cols < p)[None, :], other=0.0)
        if MASK is not None:
            own = weights + (start + places) * weights_t
            weight = tl.load(own, mask=places < tokens - start, other=0)[:, None]
            x = tl.where(weight != 0, x, 0.0)  # what is masked may be NaN
            y = tl.where(weight != 0, y, 0.0)
            if tl.float32 == MASK:  # a product in half precision would be rounded
                x, y = x.to(tl.float32), y.to(tl.float32) * weight
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        # "ieee": fp32 is multiplied in fp32. tf32 would keep 11 bits of it.
        total = tl.dot(tl.trans(x), y, total, input_precision="ieee")
        a_ptrs += K * a_t
        g_ptrs += K * g_t
    return tl.sum(tl.sum(total * total, 1), 0)


@triton.jit(do_not_specialize=["samples", "slots"])  # type: ignore[untyped-decorator]
def _table_kernel(  # type: ignore[no-untyped-def]
    table,
    partial,
    samples,
    slots,
    TYPE: tl.constexpr,
    MASK: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of one sample of one layer; any strides.

    TYPE is the inputs' dtype, MASK ``None``, ``tl.uint8`` or ``tl.float32``. WHOLE is 1, or
    what sizes and strides are multiples of where rows are contiguous and aligned.
    """
    problem = tl.program_id(1).to(tl.int64)
    sample = (tl.program_id(0) // slots).to(tl.int64)
    tile = tl.program_id(0) % slots
    row = table + problem * COLUMNS
    a = address(row, TYPE, WHOLE)
    g = address(row + 1, TYPE, WHOLE)
    batch = tl.load(row + 3)
    tokens = tl.load(row + 4).to(tl.int32)
    d = tl.multiple_of(tl.load(row + 5).to(tl.int32), WHOLE)
    p = tl.multiple_of(tl.load(row + 6).to(tl.int32), WHOLE)
    m_tiles, n_tiles = tl.maximum(tl.cdiv(d, M), 1), tl.maximum(tl.cdiv(p, N), 1)
    # Layers with fewer samples or tiles than the largest leave some programs without work.
    tokens = tl.where((sample < batch) & (tile < m_tiles * n_tiles), tokens, 0)
    m, n = place_of(tile, m_tiles, n_tiles, GROUP)
    a += sample * number(row, 7, WHOLE)
    g += sample * number(row, 10, WHOLE)
    weights = a
    if MASK is not None:
        weights = tl.load(row + 2).to(tl.pointer_type(MASK)) + sample * tl.load(row + 13)
    value = square_of_tile(
        a, g, weights, tokens, d, p, number(row, 8, WHOLE), tl.load(row + 9),
        number(row, 11, WHOLE), tl.load(row + 12), tl.load(row + 14), m, n,
        MASK, WHOLE, M, N, K, STAGES, WIDEN,
    )  # fmt: skip
    tl.store(partial + (problem * samples + sample) * slots + tile, value)


def tiles(device: torch.device) -> tuple[Tile, ...]:
    """Variants for tensors that the copy engine can read, the usual one first."""
    if not has_specialised(device):
        return TILES
    from opacus.core.kernels.norms import hopper

    return hopper.WIDTH_TILES


def norm_sq(
    activations: Tensor,
    backprops: Tensor,
    mask: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """``||A_i^T G_i||_F^2`` for each sample.

    Args:
        activations: ``[B, T, d]``, bf16, fp16 or fp32, any strides.
        backprops: ``[B, T, p]``.
        mask: ``[B, T]``: bool (which tokens count) or weights that multiply a token's
            gradient. Masked tokens may be NaN.
        tile: Variant of the kernel; by default one that fits most shapes.

    Returns:
        ``[B]`` in fp32.
    """
    a, g = check_pair(activations, backprops)
    fast = mask is None and operands.takes_tma(a, g) and (tile is None or tile.tma)
    if not fast or a.numel() == 0 or g.numel() == 0:
        return grouped_norm_sq([(a, g)], None if mask is None else [mask], tile=tile)[0]
    return tma_norm_sq(a, g, tile or tiles(g.device)[0])


def tma_norm_sq(a: Tensor, g: Tensor, tile: Tile) -> Tensor:
    """:func:`norm_sq` of tensors that :func:`operands.takes_tma` takes and that are not empty."""
    a, g = _wide_first(a, g)
    d, p = a.shape[2], g.shape[2]
    if tile.specialised:
        from opacus.core.kernels.norms import hopper

        return hopper.width_norm_sq(a, g, tile)
    tile = tile.fitted(d, p)
    batch, tokens = g.shape[:2]
    m_tiles, n_tiles = operands.parts(d, tile.m), operands.parts(p, tile.n)
    samples = _samples(m_tiles * n_tiles, batch, operands.multiprocessors(g.device))
    partial = operands.blank((batch, m_tiles * n_tiles), g.device)
    _tma_variant(tile)(
        (m_tiles * n_tiles, operands.parts(batch, samples)),
        descriptor(a, tile.k, tile.m),
        descriptor(g, tile.k, tile.n),
        partial,
        tokens,
        batch,
        samples,
        m_tiles,
        n_tiles,
    )
    return partial.sum(1)


@functools.lru_cache(maxsize=256)
def _tma_variant(tile: Tile) -> Variant:
    return Variant(
        _tma_kernel,
        M=tile.m,
        N=tile.n,
        K=tile.k,
        GROUP=tile.group,
        STAGES=tile.stages,
        WIDEN=operands.interpreted(),
        num_warps=tile.warps,
    )


def grouped_norm_sq(
    pairs: Sequence[tuple[Tensor, Tensor]],
    masks: Sequence[Tensor] | None = None,
    *,
    tile: Tile | None = None,
) -> list[Tensor]:
    """:func:`norm_sq` of many layers, of equal or different shapes, in one launch.

    Args:
        pairs: Activations and backprops of each layer, one dtype, on one device.
        masks: A mask for each layer, all bool or all weights.
        tile: Variant of the kernel.

    Returns:
        ``[B]`` for each layer.

    Raises:
        ValueError: Different dtypes or devices.
    """
    if not pairs:
        return []
    return group_norm_sq(operands.checked_group(pairs, masks), tile=tile)


def group_norm_sq(group: Group, *, tile: Tile | None = None) -> list[Tensor]:
    """:func:`grouped_norm_sq` of layers that have been looked at."""
    first, weights = group.tensors[0], group.mask_dtype
    plan = plan_of(group, tile)
    layers = len(plan.sizes)
    if plan.samples == 0:
        return [operands.blank((0,), first.device) for _ in plan.sizes]
    table, whole = table_of(group, plan)
    partial = operands.blank((layers, plan.samples, plan.slots), first.device)
    _table_variant(first.dtype, weights, whole, plan.tile)(
        (plan.samples * plan.slots, layers),
        table,
        partial,
        plan.samples,
        plan.slots,
    )
    return own_rows(partial.sum(2), plan.sizes)


def plan_of(group: Group, tile: Tile | None = None) -> Plan:
    """The plan of a launch for these layers."""
    known = (group.shapes, group.strides, group.mask_strides)
    return _plan(*known, group.tensors[0].dtype, group.mask_dtype, tile)


def table_of(group: Group, plan: Plan) -> tuple[Tensor, int]:
    """The table on the device, and what sizes, strides and addresses are multiples of."""
    table, places = plan.table[:], operands.addresses(group.tensors)
    table[0::COLUMNS] = array.array("q", [places[i] for i in plan.wide])
    table[1::COLUMNS] = array.array("q", [places[i ^ 1] for i in plan.wide])
    if group.masks:
        table[2::COLUMNS] = operands.addresses(group.masks)
    whole = plan.whole if operands.all_aligned(places) else 1
    return operands.upload(table, group.tensors[0].device), whole


class Plan(NamedTuple):
    """The plan of a launch, which depends on the layers' shapes alone.

    Attributes:
        tile: Variant of the kernel.
        samples: Most samples of a layer.
        slots: Most tiles of a sample.
        whole: What sizes and strides are multiples of, where rows are aligned; or 1.
        wide: Where the wider tensor of each pair is, with two places for each pair.
        table: Rows for the kernel, without addresses.
        sizes: Samples of each layer.
    """

    tile: Tile
    samples: int
    slots: int
    whole: int
    wide: list[int]
    table: array.array[int]
    sizes: list[int]


@functools.lru_cache(maxsize=128)
def _plan(
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    mask_strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    weights: torch.dtype | None,
    tile: Tile | None,
) -> Plan:
    operands.check_shapes(shapes)
    rows, wide, features = [], [], []
    masks = itertools.cycle(mask_strides)
    for place, mask in zip(range(0, len(shapes), 2), masks, strict=False):
        # Narrow layers have their few columns last: see _wide_first.
        first = place + (shapes[place + 1][2] > shapes[place][2])
        (batch, tokens, m), n = shapes[first], shapes[first ^ 1][2]
        wide.append(first)
        features.append((m, n))
        rows.append((0, 0, 0, batch, tokens, m, n, *strides[first], *strides[first ^ 1], *mask))
    if tile is None:
        tile = TILE_WIDE if torch.float32 in (dtype, weights) else TILE_HALF
    tile = tile.fitted(max(m for m, _ in features), max(n for _, n in features))
    slots = max(operands.parts(m, tile.m) * operands.parts(n, tile.n) for m, n in features)
    sizes = [shape[0] for shape in shapes[::2]]
    whole = operands.whole_of(shapes, strides, dtype)
    table = array.array("q", itertools.chain.from_iterable(rows))
    return Plan(tile, max(sizes), max(1, slots), whole, wide, table, sizes)


@functools.lru_cache(maxsize=256)
def _table_variant(
    dtype: torch.dtype, weights: torch.dtype | None, whole: int, tile: Tile
) -> Variant:
    return Variant(
        _table_kernel,
        TYPE=TYPES[dtype],
        MASK=None if weights is None else TYPES[weights],
        WHOLE=whole,
        COLUMNS=COLUMNS,
        M=tile.m,
        N=tile.n,
        K=tile.k,
        GROUP=tile.group,
        STAGES=tile.stages,
        WIDEN=operands.interpreted(),
        num_warps=tile.warps,
    )


def _wide_first(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of ``A^T G`` is that of ``G^T A``: narrow layers have their few columns last."""
    return (g, a) if g.shape[2] > a.shape[2] else (a, g)


@functools.lru_cache(maxsize=4096)
def _samples(tiles: int, batch: int, programs: int) -> int:
    """Samples that one program handles in turn: as many as keep all multiprocessors busy."""

    def rounds(samples: int) -> int:
        return operands.parts(tiles * operands.parts(batch, samples), programs) * samples

    best = min(rounds(s) for s in range(1, batch + 1))
    # Of those that are as fast, within 2%, the one that restarts the pipeline least.
    return max(s for s in range(1, batch + 1) if rounds(s) <= 1.02 * best)
