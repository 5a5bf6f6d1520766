"""Triton kernel of the norm of a lookup table's gradient.

``sum_st [id_s = id_t] g_s . g_t``: a Gram matrix of the backprops, of which only what equal
ids share is formed. The lookups are sorted within each sample, so that equal ids lie in the
same tile or in tiles next to each other; the others are never visited. Where terms have
cancelled, a second kernel forms the gradient. Nothing waits for the device. Letters: B samples,
T tokens, d features.
"""

# Kernels have no annotations but Triton's own: it evaluates them when it compiles.

from __future__ import annotations

import functools

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant
from opacus.core.kernels.host.operands import check_dtype, check_mask
from opacus.core.kernels.norms.direct import SLOTS, judge
from opacus.core.kernels.norms.trusted import TRUSTED

SIDE = 32
K_HALF, K_WIDE = 64, 32
# Columns of a gradient that one program forms.
SETTLED_COLUMNS = 256
# Ids of lookups that do not count: the padding row's and masked ones.
EXCLUDED = -1


@triton.jit  # type: ignore[untyped-decorator]
def _gram(  # type: ignore[no-untyped-def]
    left_rows,
    right_rows,
    left_mask,
    right_mask,
    d,
    stride_d,
    SIDE: tl.constexpr,
    K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    places = tl.arange(0, K)
    for start in tl.range(0, d, K):
        inside = (start + places < d)[None, :]
        columns = (start + places).to(tl.int64)[None, :] * stride_d
        left = tl.load(left_rows[:, None] + columns, mask=left_mask[:, None] & inside, other=0.0)
        right = tl.load(right_rows[:, None] + columns, mask=right_mask[:, None] & inside, other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        gram = tl.dot(left, tl.trans(right), gram, input_precision="ieee")
    return gram


@triton.jit  # type: ignore[untyped-decorator]
def _weight(weights, order, stride, valid, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASK:
        return tl.load(weights + order * stride, mask=valid, other=0.0)
    return valid.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _table_kernel(  # type: ignore[no-untyped-def]
    ids,
    order,
    g,
    weights,
    partial,
    tokens,
    d,
    g_b,
    g_t,
    g_d,
    weights_b,
    weights_t,
    MASK: tl.constexpr,
    SIDE: tl.constexpr,
    K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """What the lookups of one tile share with each other and with later ones."""
    tile, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids += sample * tokens
    order += sample * tokens
    g += sample * g_b
    weights += sample * weights_b
    places = tile * SIDE + tl.arange(0, SIDE)
    own = tl.load(ids + places, mask=places < tokens, other=-1)
    valid = own >= 0
    slots = tl.load(order + places, mask=places < tokens, other=0)
    left = g + slots * g_t
    own_weight = _weight(weights, slots, weights_t, valid, MASK)
    gram = _gram(left, left, valid, valid, d, g_d, SIDE, K, WIDEN)
    gram *= own_weight[:, None] * own_weight[None, :]
    same = (own[:, None] == own[None, :]) & valid[:, None]
    gram = tl.where(same, gram, 0.0)
    total = tl.sum(tl.sum(gram, 1), 0)
    size = tl.sum(tl.sum(tl.abs(gram), 1), 0)
    # Later tiles hold more of the last id, or nothing that this tile has.
    last = tl.load(ids + tl.minimum(tile * SIDE + SIDE, tokens) - 1)
    start = (tile + 1) * SIDE
    following = tl.load(ids + start, mask=start < tokens, other=-1)
    while (following == last) & (last >= 0):
        places = start + tl.arange(0, SIDE)
        other = tl.load(ids + places, mask=places < tokens, other=-1)
        others = other == last
        slots = tl.load(order + places, mask=places < tokens, other=0)
        mine = own == last
        gram = _gram(left, g + slots * g_t, mine, others, d, g_d, SIDE, K, WIDEN)
        weight = _weight(weights, slots, weights_t, others, MASK)
        gram *= own_weight[:, None] * weight[None, :]
        gram = tl.where(mine[:, None] & others[None, :], gram, 0.0)
        total += 2.0 * tl.sum(tl.sum(gram, 1), 0)
        size += 2.0 * tl.sum(tl.sum(tl.abs(gram), 1), 0)
        start += SIDE
        following = tl.load(ids + start, mask=start < tokens, other=-1)
    out = partial + sample * tl.num_programs(0) + tile
    tl.store(out, total)
    tl.store(out + tl.num_programs(1).to(tl.int64) * tl.num_programs(0), size)


@triton.jit(do_not_specialize=["tokens", "slots"])  # type: ignore[untyped-decorator]
def _settle_kernel(  # type: ignore[no-untyped-def]
    ids,
    order,
    g,
    weights,
    sums,
    sizes,
    out,
    tokens,
    slots,
    d,
    g_b,
    g_t,
    g_d,
    weights_b,
    weights_t,
    MASK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRUSTED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Where terms have cancelled, the gradient itself: some columns of one sample."""
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total, trusted = judge(sums + sample * slots, sizes + sample * slots, slots, TRUSTED, SLOTS)
    ids += sample * tokens
    order += sample * tokens
    weights += sample * weights_b
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    g += sample * g_b + columns.to(tl.int64) * g_d
    row = tl.zeros((COLUMNS,), dtype=tl.float32)
    squares = tl.zeros((COLUMNS,), dtype=tl.float32)
    last = tl.full((), -1, tl.int64)
    for place in range(0, tl.where(trusted, 0, tokens)):
        own, slot = tl.load(ids + place), tl.load(order + place)
        fresh = own != last  # equal ids lie next to each other
        squares += tl.where(fresh, row * row, 0.0)
        inside = (columns < d) & (own >= 0)
        value = tl.load(g + slot * g_t, mask=inside, other=0.0).to(tl.float32)
        if MASK:
            value *= tl.load(weights + slot * weights_t)
        row = tl.where(fresh, 0.0, row) + tl.where(inside, value, 0.0)
        last = own
    value = tl.sum(squares + row * row, 0) + tl.where(trusted & (block == 0), total, 0.0)
    tl.store(out + sample * tl.num_programs(0) + block, value)


def embedding_norm_sq(
    ids: Tensor,
    backprops: Tensor,
    padding_idx: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Squared norm of each sample's gradient of a lookup table, equal ids added first.

    Args:
        ids: ``[B, T]`` rows that were looked up.
        backprops: ``[B, T, d]``, bf16, fp16 or fp32, any strides.
        padding_idx: A row that gets no gradient.
        mask: ``[B, T]``: bool (which tokens count) or weights that multiply a token's
            gradient. Masked tokens may be NaN.

    Returns:
        ``[B]`` in fp32.
    """
    check_dtype(backprops)
    if backprops.dim() != 3 or ids.shape != backprops.shape[:2]:
        raise ValueError(
            f"ids must be [B, T] and backprops [B, T, d], got {list(ids.shape)} and "
            f"{list(backprops.shape)}"
        )
    batch, tokens, d = backprops.shape
    if backprops.numel() == 0:
        return backprops.new_zeros(batch, dtype=torch.float32)
    weights = check_mask(mask, backprops)
    ids = ids.long()
    if padding_idx is not None:
        ids = ids.masked_fill(ids == padding_idx, EXCLUDED)
    if weights is not None:
        ids = ids.masked_fill(weights == 0, EXCLUDED)
    ids, order = ids.sort(dim=1)
    weighted = weights is not None and weights.is_floating_point()
    tiles = operands.parts(tokens, SIDE)
    partial = operands.blank((2, batch, tiles), backprops.device)
    own = weights if weighted and weights is not None else partial
    strides = operands.NO_STRIDES if own is partial else (own.stride(0), own.stride(1))
    ids, order = ids.contiguous(), order.contiguous()
    _variant(weighted, backprops.dtype)(
        (tiles, batch), ids, order, backprops, own, partial, tokens, d,
        *backprops.stride(), *strides,
    )  # fmt: skip
    blocks = operands.parts(d, SETTLED_COLUMNS)
    out = operands.blank((batch, blocks), backprops.device)
    _settle_variant(weighted)(
        (blocks, batch), ids, order, backprops, own, *partial.unbind(), out, tokens, tiles, d,
        *backprops.stride(), *strides,
    )  # fmt: skip
    return out.sum(1)


@functools.cache
def _variant(mask: bool, dtype: torch.dtype) -> Variant:
    return Variant(
        _table_kernel,
        MASK=mask,
        SIDE=SIDE,
        K=K_WIDE if dtype == torch.float32 else K_HALF,
        WIDEN=operands.interpreted(),
        num_warps=4,
    )


@functools.cache
def _settle_variant(mask: bool) -> Variant:
    return Variant(
        _settle_kernel,
        MASK=mask,
        COLUMNS=SETTLED_COLUMNS,
        TRUSTED=TRUSTED,
        SLOTS=SLOTS,
        num_warps=4,
    )
