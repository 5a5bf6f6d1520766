"""Launches kernels of ``||A_i^T G_i||_F^2`` as ``sum_ts (A A^T)_ts (G G^T)_ts``.

The algorithm ``"input_length"``: ``B T^2 (d + p)`` operations. Only tiles on and above the
diagonal are formed; they stay in registers. Layers with one input share its Gram matrix. Where
terms have cancelled, ``direct`` mends the norm. B samples, T tokens, d and p features.
"""

from __future__ import annotations

import array
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.host.operands import Group, Tile, check_mask, check_pair
from opacus.core.kernels.host.triton_host import TYPES, descriptor
from opacus.core.kernels.norms import direct
from opacus.core.kernels.norms.gram_triton import (
    INPUT_COLUMNS,
    OUTPUT_COLUMNS,
    _table_kernel,
    _tma_kernel,
)
from opacus.core.kernels.norms.specialised import has_specialised

# For tensors that the copy engine can read.
TILES = (
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(128, 128, 128, warps=8, stages=3),
    Tile(64, 64, 128, warps=4, stages=3),
)
# For all others, and for many layers in one launch.
TILE_HALF = Tile(64, 64, 64, warps=4, stages=3, tma=False)
TILE_WIDE = Tile(64, 64, 16, warps=4, stages=2, tma=False)
# Backprops that one launch takes beside one input.
MOST_SHARED = 3


def tiles(device: torch.device) -> tuple[Tile, ...]:
    """Variants for tensors that the copy engine can read, the usual one first."""
    if not has_specialised(device):
        return TILES
    from opacus.core.kernels.norms import hopper

    return (*hopper.GRAM_TILES, *TILES)


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
    return shared_norm_sq(activations, [backprops], mask, tile=tile)[0]


def shared_norm_sq(
    activations: Tensor,
    backprops: Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> list[Tensor]:
    """:func:`norm_sq` of several layers with the same input, whose Gram matrix is formed once.

    Args:
        activations: ``[B, T, d]``.
        backprops: ``[B, T, p_j]`` of each layer.
        mask: As in :func:`norm_sq`.
        tile: Variant of the kernel.

    Returns:
        ``[B]`` for each layer.
    """
    pairs = [check_pair(activations, g) for g in backprops]
    if not pairs:
        return []
    a, gs = pairs[0][0], [g for _, g in pairs]
    fast = operands.takes_tma(a, *gs) and (tile is None or tile.tma)
    if not fast or a.numel() == 0 or any(g.numel() == 0 for g in gs):
        masks = None if mask is None else [mask] * len(gs)
        return grouped_norm_sq([(x, g) for x, g in pairs], masks, tile=tile)
    return tma_norm_sq(a, gs, check_mask(mask, gs[0]), tile or tiles(a.device)[0])


def tma_norm_sq(
    a: Tensor, gs: Sequence[Tensor], weights: Tensor | None, tile: Tile
) -> list[Tensor]:
    """:func:`shared_norm_sq` of what :func:`operands.takes_tma` takes and what is not empty."""
    if tile.specialised:
        if weights is None and len(gs) == 1:
            from opacus.core.kernels.norms import hopper

            return [direct.settle(a, gs[0], None, hopper.gram_sums(a, gs[0], tile))]
        tile = TILES[0]  # which knows masks and shared inputs
    norms: list[Tensor] = []
    for start in range(0, len(gs), MOST_SHARED):
        norms += _launch_tma(a, gs[start : start + MOST_SHARED], weights, tile)
    return norms


def _launch_tma(
    a: Tensor, gs: Sequence[Tensor], weights: Tensor | None, tile: Tile
) -> list[Tensor]:
    batch, tokens, d = a.shape
    side = min(tile.m, operands.power_of_two(tokens, 64))
    group, slots = _slots(tokens, side, tile.group)
    partial = operands.blank((2, len(gs), batch, slots), a.device)
    three = [*gs, *[gs[0]] * (MOST_SHARED - len(gs))]
    _tma_variant(len(gs), weights is not None, side, group, tile)(
        (slots, batch),
        descriptor(a, side, tile.k),
        *(descriptor(g, side, tile.k) for g in three),
        partial if weights is None else weights,
        partial,
        tokens,
        d,
        *(g.shape[2] for g in three),
        *(operands.NO_STRIDES if weights is None else weights.stride()),
    )
    return [direct.settle(a, g, weights, partial[:, i]) for i, g in enumerate(gs)]


@functools.lru_cache(maxsize=256)
def _tma_variant(count: int, mask: bool, side: int, group: int, tile: Tile) -> Variant:
    return Variant(
        _tma_kernel,
        COUNT=count,
        MASK=mask,
        SIDE=side,
        K=tile.k,
        GROUP=group,
        STAGES=tile.stages,
        WIDEN=operands.interpreted(),
        num_warps=tile.warps if side > 64 else min(4, tile.warps),
    )


def grouped_norm_sq(
    pairs: Sequence[tuple[Tensor, Tensor]],
    masks: Sequence[Tensor] | None = None,
    *,
    tile: Tile | None = None,
) -> list[Tensor]:
    """:func:`norm_sq` of many layers, of equal or different shapes, in one launch.

    Args:
        pairs: Activations and backprops of each layer, one dtype, on one device. Neighbours
            with the same activations (and mask) share their Gram matrix.
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
    first = group.tensors[0]
    places = operands.addresses(group.tensors)
    masks = operands.addresses(group.masks) if group.masks else None
    starts = _starts(group, places, masks)
    plan = _plan(group.shapes, group.strides, group.mask_strides, starts, first.dtype, tile)
    if plan.samples == 0:
        return [operands.blank((0,), first.device) for _ in plan.sizes]
    table, end = plan.table[:], len(starts) * INPUT_COLUMNS
    table[0:end:INPUT_COLUMNS] = array.array("q", [places[2 * i] for i in starts])
    if masks is not None:
        table[1:end:INPUT_COLUMNS] = array.array("q", [masks[i] for i in starts])
    table[end::OUTPUT_COLUMNS] = places[1::2]
    partial = operands.blank((2, len(plan.sizes), plan.samples, plan.slots), first.device)
    whole = plan.whole if operands.all_aligned(places) else 1
    _table_variant(first.dtype, group.mask_dtype, whole, plan.side, plan.group, plan.tile)(
        (plan.samples * plan.slots, len(starts)),
        operands.upload(table, first.device),
        partial,
        plan.samples,
        plan.slots,
        len(starts),
        len(plan.sizes),
    )
    return direct.settle_group(group, partial)


def _starts(group: Group, places: Sequence[int], masks: Sequence[int] | None) -> tuple[int, ...]:
    """The layers whose activations or mask differ from those of the layer before."""
    starts = [0]
    shapes, strides, mask_strides = group.shapes, group.strides, group.mask_strides
    for i in range(2, len(places), 2):
        if (
            places[i] != places[i - 2]
            or shapes[i] != shapes[i - 2]
            or strides[i] != strides[i - 2]
            or (masks is not None and masks[i // 2] != masks[i // 2 - 1])
            or (masks is not None and mask_strides[i // 2] != mask_strides[i // 2 - 1])
        ):
            starts.append(i // 2)
    return tuple(starts)


class _Plan(NamedTuple):
    """The plan of a launch, which depends on the layers' shapes alone.

    Attributes:
        tile: Variant of the kernel.
        side: Side of a tile of a Gram matrix.
        group: See :func:`_slots`.
        slots: See :func:`_slots`.
        samples: Most samples of a layer.
        whole: What sizes and strides are multiples of, where rows are aligned; or 1.
        table: Rows for the kernel, without addresses: inputs, then backprops.
        sizes: Samples of each layer.
    """

    tile: Tile
    side: int
    group: int
    slots: int
    samples: int
    whole: int
    table: array.array[int]
    sizes: list[int]


@functools.lru_cache(maxsize=128)
def _plan(
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    mask_strides: tuple[tuple[int, ...], ...],
    starts: tuple[int, ...],
    dtype: torch.dtype,
    tile: Tile | None,
) -> _Plan:
    """``starts``: layers with an input of their own; others share that of the layer before."""
    operands.check_shapes(shapes)
    tile = tile or (TILE_WIDE if dtype == torch.float32 else TILE_HALF)
    tokens, sizes = max(shape[1] for shape in shapes), [shape[0] for shape in shapes[::2]]
    side = min(tile.m, operands.power_of_two(tokens, 16))
    group, slots = _slots(tokens, side, tile.group)
    rows: list[tuple[int, ...]] = []
    for start, stop in zip(starts, (*starts[1:], len(shapes) // 2), strict=True):
        mask = mask_strides[start % len(mask_strides)]
        rows.append((0, 0, *shapes[2 * start], *strides[2 * start], *mask, start, stop - start))
    backprops = zip(shapes[1::2], strides[1::2], strict=True)
    rows += [(0, shape[2], *own) for shape, own in backprops]
    table = array.array("q", itertools.chain.from_iterable(rows))
    whole = operands.whole_of(shapes, strides, dtype)
    return _Plan(tile, side, group, slots, max(sizes), whole, table, sizes)


@functools.lru_cache(maxsize=256)
def _table_variant(
    dtype: torch.dtype, weights: torch.dtype | None, whole: int, side: int, group: int, tile: Tile
) -> Variant:
    return Variant(
        _table_kernel,
        TYPE=TYPES[dtype],
        MASK=None if weights is None else TYPES[weights],
        WHOLE=whole,
        INPUT_COLUMNS=INPUT_COLUMNS,
        OUTPUT_COLUMNS=OUTPUT_COLUMNS,
        SIDE=side,
        K=tile.k,
        GROUP=group,
        STAGES=tile.stages,
        WIDEN=operands.interpreted(),
        num_warps=tile.warps if side > 32 else min(4, tile.warps),
    )


@functools.lru_cache(maxsize=4096)
def _slots(tokens: int, side: int, most: int) -> tuple[int, int]:
    """Side of the squares of tiles that run together, and programs for a sample."""
    tiles = max(1, operands.parts(tokens, side))
    group = min(most, operands.power_of_two(tiles))
    squares = operands.parts(tiles, group)
    return group, squares * (squares + 1) // 2 * group * group
