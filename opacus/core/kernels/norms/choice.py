"""Chooses how a norm is computed: by what each way cost on this card, measured once.

Every way gives the same number up to rounding. On machines without Triton or CUDA, and for
fp64, there is only the reference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.operands import (
    MOST_FEATURES,
    SUPPORTED,
    Tile,
    interpreted,
    triton_is_installed,
)
from opacus.core.kernels.norms import clock, reference
from opacus.core.kernels.norms.clock import REFERENCE, Ways, fastest, fastest_of, key_of
from opacus.core.kernels.norms.reference import sum_of_squares, widen

WIDTH, INPUT_LENGTH = "width", "input_length"
# Layers with one input: each as if it had an input of its own.
SEPARATE = "separate"
ALGORITHMS = (INPUT_LENGTH, WIDTH)
# An algorithm that needs this many times the operations of the other is not measured.
HOPELESS = 8
# Kinds of products that are remembered: more come only where lengths vary from step to step.
MOST_REMEMBERED = 4096

# The function that takes products of tensors of these shapes, strides and kinds; looked up in each
# layer and step.
_products: dict[tuple[Any, ...], Callable[..., list[Tensor]]] = {}


def is_usable(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors, on this machine."""
    there = True
    for tensor in tensors:
        there = there and tensor.is_cuda
        if tensor.dtype not in SUPPORTED and tensor.is_floating_point():
            return False
    there = there or (not tensors[0].is_cuda and interpreted())
    return there and triton_is_installed()


# --- what is computed, and in which ways ---


def product_norm_sq(activations: Tensor, backprops: Tensor, mask: Tensor | None = None) -> Tensor:
    """``||A_i^T G_i||_F^2`` for each sample: a linear layer's weight, a convolution's patches.

    Args:
        activations: ``[B, T, d]``.
        backprops: ``[B, T, p]``.
        mask: ``[B, T]``: bool (which tokens count) or weights that multiply a token's
            gradient. ``None``: all count once.

    Returns:
        ``[B]`` in fp32 (fp64 for fp64).
    """
    return shared_product_norm_sq(activations, [backprops], mask)[0]


def shared_product_norm_sq(
    activations: Tensor, backprops: Sequence[Tensor], mask: Tensor | None = None
) -> list[Tensor]:
    """:func:`product_norm_sq` of several layers with the same input (query, key and value, say).

    The Gram matrix of the input is formed once, where that is faster than one layer at a time.
    """
    if not backprops or not is_usable(activations, *backprops):
        return _each_reference(activations, backprops, mask)
    alike = _alike(activations, backprops, mask)
    chosen = _products.get(alike)
    if chosen is not None:
        return chosen(activations, backprops, mask)
    aligned = mask is None and _take_tma(activations, backprops)
    batch, tokens, d = activations.shape
    widths = [g.shape[2] for g in backprops]
    key = key_of("product", backprops[0], [batch, tokens, d, *widths], (aligned, _kind(mask)))
    tiles = _tiles_of(activations.device, aligned)
    takers: dict[str, Callable[..., list[Tensor]]] = {REFERENCE: _each_reference}
    for algorithm in _worth_trying(tokens, d, widths):
        if algorithm == WIDTH and len(widths) > 1:
            continue  # nothing to share; the best kernel of each layer is in SEPARATE
        for name, (own, tile) in tiles.items():
            if own == algorithm:
                takers[name] = _taker(algorithm, tile)
    if len(widths) > 1:
        takers[SEPARATE] = _each_alone
    arguments = (activations, backprops, mask)
    norms = fastest(key, {n: functools.partial(t, *arguments) for n, t in takers.items()})
    best = fastest_of(key, tuple(takers))
    # While a graph is captured the best kernels may not be known yet.
    if best is not None and not torch.cuda.is_current_stream_capturing():
        if len(_products) >= MOST_REMEMBERED:
            _products.clear()
        _products[alike] = takers[best]
    return norms


def _alike(
    activations: Tensor, backprops: Sequence[Tensor], mask: Tensor | None
) -> tuple[Any, ...]:
    """Equal for tensors whose products are taken in the same way, by the same kernel."""
    return (
        activations.dtype,
        activations.get_device(),
        activations.shape,
        activations.stride(),
        activations.data_ptr() % operands.ALIGNMENT,
        None if mask is None else mask.dtype,
        *[
            (g.dtype, g.get_device(), g.shape, g.stride(), g.data_ptr() % operands.ALIGNMENT)
            for g in backprops
        ],
    )


def _take_tma(activations: Tensor, backprops: Sequence[Tensor]) -> bool:
    """Whether the kernels that use the copy engine take these tensors as they are."""
    tensors = [activations]
    for g in backprops:
        operands.check_pair(activations, g)
        tensors.append(g)
    one_dtype = len({t.dtype for t in tensors}) == 1
    return one_dtype and all(t.numel() for t in tensors) and operands.takes_tma(*tensors)


def _each_reference(
    activations: Tensor, backprops: Sequence[Tensor], mask: Tensor | None
) -> list[Tensor]:
    return [reference_product(activations, g, mask) for g in backprops]


def _each_alone(
    activations: Tensor, backprops: Sequence[Tensor], mask: Tensor | None
) -> list[Tensor]:
    return [product_norm_sq(activations, g, mask) for g in backprops]


def _taker(algorithm: str, tile: Tile | None) -> Callable[..., list[Tensor]]:
    """The function of this algorithm; with the copy engine if a tile is given."""
    from opacus.core.kernels.norms import gram, width

    if algorithm == INPUT_LENGTH:
        if tile is None:
            return gram.shared_norm_sq
        return functools.partial(gram.tma_norm_sq, tile=tile)
    if tile is None:
        return lambda a, gs, mask: [width.norm_sq(a, g, mask) for g in gs]
    return lambda a, gs, _: [width.tma_norm_sq(a, g, tile) for g in gs]


def _tiles_of(device: torch.device, aligned: bool) -> dict[str, tuple[str, Tile | None]]:
    """Algorithm and variant of each way with kernels, by name."""
    if not aligned:
        return {name: (name, None) for name in ALGORITHMS}
    from opacus.core.kernels.norms import gram, width

    modules = {WIDTH: width, INPUT_LENGTH: gram}
    kinds = tuple(modules[name].tiles(device) for name in ALGORITHMS)
    return _named(kinds)


@functools.lru_cache(maxsize=64)
def _named(kinds: tuple[tuple[Tile, ...], ...]) -> dict[str, tuple[str, Tile | None]]:
    named = zip(ALGORITHMS, kinds, strict=True)
    return {f"{name} {tile}": (name, tile) for name, tiles in named for tile in tiles}


def grouped_product_norm_sq(
    pairs: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """:func:`product_norm_sq` of many layers, in one launch where Triton runs."""
    own: Sequence[Tensor | None] = masks or [None] * len(pairs)
    if not pairs or not is_usable(pairs[0][0]):
        return [reference_product(a, g, m) for (a, g), m in zip(pairs, own, strict=True)]
    group = operands.group_of(pairs, masks)
    if group is None:  # of several dtypes
        return [product_norm_sq(a, g, m) for (a, g), m in zip(pairs, own, strict=True)]

    def way(name: str) -> list[Tensor]:
        if name == REFERENCE:
            return [reference_product(a, g, m) for (a, g), m in zip(pairs, own, strict=True)]
        from opacus.core.kernels.norms import gram, width

        return (width if name == WIDTH else gram).group_norm_sq(group)

    names, sizes = _grouped(group.shapes)
    ways: Ways[list[Tensor]] = {name: functools.partial(way, name) for name in names}
    return fastest(key_of("grouped", pairs[0][1], sizes, (_kind(own[0]),)), ways)


@functools.lru_cache(maxsize=64)
def _grouped(shapes: tuple[torch.Size, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Ways worth trying for layers of these shapes, and the sizes that the choice depends on."""
    layers = [(*a, g[2]) for a, g in zip(shapes[::2], shapes[1::2], strict=True)]
    costs = {name: sum(_operations(name, *layer) for layer in layers) for name in ALGORITHMS}
    most = HOPELESS * min(costs.values())
    names = [name for name in (WIDTH, INPUT_LENGTH) if costs[name] <= most]
    distinct = sorted(set(layers))
    return (REFERENCE, *names), (len(layers), *itertools.chain.from_iterable(distinct[:4]))


def bias_norm_sq(backprops: Tensor, mask: Tensor | None = None) -> Tensor:
    """``||sum_t G_it||^2`` for each sample, backprops ``[B, T, p]``; see the kernel."""
    ways: Ways[Tensor] = {
        REFERENCE: lambda: sum_of_squares(widen(apply_mask(backprops, mask)).sum(1))
    }
    if not is_usable(backprops):
        return ways[REFERENCE]()
    from opacus.core.kernels.norms import bias_and_affine as rows

    ways["rows"] = lambda: rows.bias_norm_sq(backprops, mask)
    return fastest(key_of("bias", backprops, backprops.shape, (_kind(mask),)), ways)


def affine_norm_sq(
    inputs: Tensor,
    backprops: Tensor,
    *,
    eps: float,
    centre: bool,
    bias: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Norms of a normalisation layer's weight and bias, ``[B, T, d]``; see the kernel."""
    ways: Ways[tuple[Tensor, Tensor | None]] = {
        REFERENCE: lambda: _reference_affine(inputs, backprops, eps, centre, bias, mask)
    }
    if not is_usable(inputs, backprops):
        return ways[REFERENCE]()
    from opacus.core.kernels.norms import bias_and_affine as rows

    if inputs.shape[2] > MOST_FEATURES:
        return ways[REFERENCE]()
    ways["rows"] = lambda: rows.affine_norm_sq(
        inputs, backprops, eps=eps, centre=centre, bias=bias, mask=mask
    )
    options = (centre, bias, _kind(mask))
    return fastest(key_of("affine", backprops, backprops.shape, options), ways)


def embedding_norm_sq(
    ids: Tensor, backprops: Tensor, padding_idx: int | None = None, mask: Tensor | None = None
) -> Tensor:
    """Norms of a lookup table's gradient, ids ``[B, T]``, backprops ``[B, T, d]``."""
    ways: Ways[Tensor] = {
        REFERENCE: lambda: _reference_embedding(ids, backprops, padding_idx, mask)
    }
    if not is_usable(backprops, ids):
        return ways[REFERENCE]()
    from opacus.core.kernels.norms import embedding as table

    ways["table"] = lambda: table.embedding_norm_sq(ids, backprops, padding_idx, mask)
    return fastest(key_of("embedding", backprops, backprops.shape, (_kind(mask),)), ways)


# --- the references ---


def apply_mask(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Multiply each token of ``[B, T, ...]`` by its weight; what is masked may be NaN."""
    if mask is None:
        return tensor
    column = mask[..., None]
    kept = tensor.masked_fill(column == 0, 0.0)
    return kept if mask.dtype == torch.bool else widen(kept) * column


def reference_product(activations: Tensor, backprops: Tensor, mask: Tensor | None) -> Tensor:
    """:func:`product_norm_sq` in plain PyTorch."""
    if mask is not None:
        activations = activations.masked_fill((mask == 0)[..., None], 0.0)
        backprops = apply_mask(backprops, mask)
    wide = torch.promote_types(activations.dtype, backprops.dtype)
    return reference.product_norm_sq(activations.to(wide), backprops.to(wide))


def _reference_affine(
    inputs: Tensor, backprops: Tensor, eps: float, centre: bool, bias: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    x, g = widen(inputs), widen(apply_mask(backprops, mask))
    if mask is not None:
        x = x.masked_fill((mask == 0)[..., None], 0.0)
    normalise = F.layer_norm if centre else F.rms_norm
    weight = sum_of_squares((g * normalise(x, x.shape[2:], eps=eps)).sum(1))
    return weight, sum_of_squares(g.sum(1)) if bias else None


def _reference_embedding(
    ids: Tensor, backprops: Tensor, padding_idx: int | None, mask: Tensor | None
) -> Tensor:
    g = apply_mask(backprops, mask)
    if padding_idx is not None:
        g = g.masked_fill((ids == padding_idx)[..., None], 0.0)
    samples = torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)
    lookups = (ids.reshape(-1), samples.reshape(-1), g.flatten(0, 1))
    return reference.table_norm_sq(*lookups, len(ids))


def forget() -> None:
    """Measure everything anew (and read the file again, if one is named)."""
    clock.forget()
    _products.clear()


def _operations(algorithm: str, batch: int, tokens: int, d: int, p: int) -> int:
    """Multiply-adds; at least one tile's worth of tokens and features is multiplied."""
    tokens, d, p = max(tokens, 16), max(d, 16), max(p, 16)
    if algorithm == WIDTH:
        return batch * tokens * d * p
    return batch * tokens * (tokens + 64) // 2 * (d + p)


def _worth_trying(tokens: int, d: int, widths: Sequence[int]) -> Iterator[str]:
    costs = {name: sum(_operations(name, 1, tokens, d, p) for p in widths) for name in ALGORITHMS}
    for name in sorted(costs, key=costs.__getitem__):
        if costs[name] <= HOPELESS * min(costs.values()):
            yield name


def _kind(mask: Tensor | None) -> str:
    return "all" if mask is None else "bool" if mask.dtype == torch.bool else "weights"
