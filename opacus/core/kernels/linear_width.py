"""Triton kernels of ``||A_i^T G_i||_F^2``: tiles of the product are squared in registers.

The algorithm ``"width"``: ``2 B T d p`` operations, whatever the width of the layer the
memory is one number for each tile. Letters: B samples, T tokens, d and p features.
"""

# Kernels have no annotations but Triton's own: it evaluates them when it compiles.

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from opacus.core.kernels import operands
from opacus.core.kernels.operands import Tile, check_pair
from opacus.core.kernels.triton_host import TYPES, descriptor, has_specialised, own_rows

# For tensors that the copy engine can read. Several, because the best one depends on how
# many tiles there are; see opacus.core.kernels.choice.
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
def _place(tile, m_tiles, n_tiles, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
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
    m, n = _place(tile, m_tiles, n_tiles, GROUP)
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
def _number(row, column: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """An int64 of the table, known to be a multiple of ``WHOLE``."""
    return tl.multiple_of(tl.load(row + column), WHOLE)


@triton.jit  # type: ignore[untyped-decorator]
def _address(place, TYPE: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer from the table, known to be aligned to 16 bytes if ``WHOLE > 1``."""
    pointer = tl.load(place).to(tl.pointer_type(TYPE))
    if WHOLE > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


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
    a = _address(row, TYPE, WHOLE)
    g = _address(row + 1, TYPE, WHOLE)
    batch = tl.load(row + 3)
    tokens = tl.load(row + 4).to(tl.int32)
    d = tl.multiple_of(tl.load(row + 5).to(tl.int32), WHOLE)
    p = tl.multiple_of(tl.load(row + 6).to(tl.int32), WHOLE)
    m_tiles, n_tiles = tl.maximum(tl.cdiv(d, M), 1), tl.maximum(tl.cdiv(p, N), 1)
    # Layers with fewer samples or tiles than the largest leave some programs without work.
    tokens = tl.where((sample < batch) & (tile < m_tiles * n_tiles), tokens, 0)
    m, n = _place(tile, m_tiles, n_tiles, GROUP)
    a_cols, g_cols = m * M + tl.arange(0, M), n * N + tl.arange(0, N)
    places = tl.arange(0, K)
    a_next, g_next = _number(row, 8, WHOLE), _number(row, 11, WHOLE)
    a += sample * _number(row, 7, WHOLE)
    g += sample * _number(row, 10, WHOLE)
    if WHOLE > 1:
        a_ptrs = a + places[:, None] * a_next + a_cols[None, :]
        g_ptrs = g + places[:, None] * g_next + g_cols[None, :]
    else:
        a_ptrs = a + places[:, None] * a_next + a_cols[None, :] * tl.load(row + 9)
        g_ptrs = g + places[:, None] * g_next + g_cols[None, :] * tl.load(row + 12)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in tl.range(0, tokens, K, num_stages=STAGES):
        inside = (places < tokens - start)[:, None]
        x = tl.load(a_ptrs, mask=inside & (a_cols < d)[None, :], other=0.0)
        y = tl.load(g_ptrs, mask=inside & (g_cols < p)[None, :], other=0.0)
        if MASK is not None:
            weights = tl.load(row + 2).to(tl.pointer_type(MASK))
            weights += sample * tl.load(row + 13) + (start + places) * tl.load(row + 14)
            weight = tl.load(weights, mask=places < tokens - start, other=0)[:, None]
            x = tl.where(weight != 0, x, 0.0)  # what is masked may be NaN
            y = tl.where(weight != 0, y, 0.0)
            if tl.float32 == MASK:  # a product in half precision would be rounded
                x, y = x.to(tl.float32), y.to(tl.float32) * weight
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        # "ieee": fp32 is multiplied in fp32. tf32 would keep 11 bits of it.
        total = tl.dot(tl.trans(x), y, total, input_precision="ieee")
        a_ptrs += K * a_next
        g_ptrs += K * g_next
    value = tl.sum(tl.sum(total * total, 1), 0)
    tl.store(partial + (problem * samples + sample) * slots + tile, value)


def tiles(device: torch.device) -> tuple[Tile, ...]:
    """Variants for tensors that the copy engine can read, the usual one first."""
    if not has_specialised(device):
        return TILES
    from opacus.core.kernels import hopper

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
    a, g = _wide_first(a, g)
    d, p = a.shape[2], g.shape[2]
    tile = tile or tiles(g.device)[0]
    if tile.specialised:
        from opacus.core.kernels import hopper

        return hopper.width_norm_sq(a, g, tile)
    tile = tile.fitted(d, p)
    batch, tokens = g.shape[:2]
    m_tiles, n_tiles = operands.parts(d, tile.m), operands.parts(p, tile.n)
    samples = _samples(m_tiles * n_tiles, batch, operands.multiprocessors(g.device))
    partial = operands.blank((batch, m_tiles * n_tiles), g.device)
    _tma_kernel[(m_tiles * n_tiles, operands.parts(batch, samples))](
        descriptor(a, tile.k, tile.m),
        descriptor(g, tile.k, tile.n),
        partial,
        tokens,
        batch,
        samples,
        m_tiles,
        n_tiles,
        M=tile.m,
        N=tile.n,
        K=tile.k,
        GROUP=tile.group,
        STAGES=tile.stages,
        WIDEN=operands.interpreted(),
        num_warps=tile.warps,
    )
    return partial.sum(1)


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
    pairs = [_wide_first(*check_pair(a, g)) for a, g in pairs]
    if not pairs:
        return []
    first, kept = pairs[0][1], operands.check_group(pairs, masks)
    samples = max(len(g) for _, g in pairs)
    if samples == 0:
        return [operands.blank((0,), first.device) for _ in pairs]
    tile = _table_tile(pairs, kept[0], tile)
    slots = max(
        operands.parts(a.shape[2], tile.m) * operands.parts(g.shape[2], tile.n) for a, g in pairs
    )
    partial = operands.blank((len(pairs), samples, max(1, slots)), first.device)
    aligned = operands.is_aligned(*(t for pair in pairs for t in pair))
    table = itertools.chain.from_iterable(map(_row, *zip(*pairs, strict=True), kept))
    _table_kernel[(samples * max(1, slots), len(pairs))](
        operands.upload(table, first.device),
        partial,
        samples,
        max(1, slots),
        TYPE=TYPES[first.dtype],
        MASK=None if kept[0] is None else TYPES[kept[0].dtype],
        WHOLE=operands.ALIGNMENT // first.element_size() if aligned else 1,
        COLUMNS=COLUMNS,
        M=tile.m,
        N=tile.n,
        K=tile.k,
        GROUP=tile.group,
        STAGES=tile.stages,
        WIDEN=operands.interpreted(),
        num_warps=tile.warps,
    )
    return own_rows(partial.sum(2), pairs)


def _wide_first(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of ``A^T G`` is that of ``G^T A``: narrow layers have their few columns last."""
    return (g, a) if g.shape[2] > a.shape[2] else (a, g)


def _table_tile(
    pairs: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None, tile: Tile | None
) -> Tile:
    wide = pairs[0][1].dtype == torch.float32 or (mask is not None and mask.is_floating_point())
    tile = tile or (TILE_WIDE if wide else TILE_HALF)
    fitted = tile.fitted(max(a.shape[2] for a, _ in pairs), max(g.shape[2] for _, g in pairs))
    return fitted


def _row(a: Tensor, g: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    place, strides = (0, (0, 0)) if mask is None else (mask.data_ptr(), mask.stride())
    batch, tokens, d = a.shape
    sizes = (batch, tokens, d, g.shape[2])
    return (a.data_ptr(), g.data_ptr(), place, *sizes, *a.stride(), *g.stride(), *strides)


def _samples(tiles: int, batch: int, programs: int) -> int:
    """Samples that one program handles in turn: as many as keep all multiprocessors busy."""

    def rounds(samples: int) -> int:
        return operands.parts(tiles * operands.parts(batch, samples), programs) * samples

    best = min(rounds(s) for s in range(1, batch + 1))
    # Of those that are as fast, within 2%, the one that restarts the pipeline least.
    return max(s for s in range(1, batch + 1) if rounds(s) <= 1.02 * best)
