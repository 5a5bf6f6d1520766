"""Triton kernels of norms of gradients that are sums over tokens: biases, normalisation layers.

Backprops are read once. Letters: B samples, T tokens, d and p features, C parts of the tokens.
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
from opacus.core.kernels.host.operands import (
    MOST_FEATURES,
    check_dtype,
    check_mask,
    check_pair,
)

# Numbers of one pass over a normalisation layer's rows.
ROW_NUMBERS = 4096
TOKENS, COLUMNS = 32, 64
# Programs for each multiprocessor, so that enough loads are under way.
PROGRAMS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _weight(weights, places, stride, inside):  # type: ignore[no-untyped-def]
    return tl.load(weights + places.to(tl.int64) * stride, mask=inside, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    g,
    weights,
    partial,
    tokens,
    p,
    g_b,
    g_t,
    g_p,
    weights_b,
    weights_t,
    MASK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Squared norm of a sample's sum over tokens, for some of the columns."""
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.arange(0, TOKENS)
    g += sample * g_b
    weights += sample * weights_b
    pointers = g + places.to(tl.int64)[:, None] * g_t + columns.to(tl.int64)[None, :] * g_p
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, tokens, TOKENS):
        inside = places < tokens - start
        mask = inside[:, None] & (columns < p)[None, :]
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if MASK:
            weight = _weight(weights, start + places, weights_t, inside)[:, None]
            value = tl.where(weight != 0, value * weight, 0.0)
        total += value
        pointers += tl.cast(TOKENS, tl.int64) * g_t
    sums = tl.sum(total, 0)
    tl.store(partial + sample * tl.num_programs(0) + block, tl.sum(sums * sums, 0))


@triton.jit(do_not_specialize=["tokens", "share"])  # type: ignore[untyped-decorator]
def _affine_kernel(  # type: ignore[no-untyped-def]
    x,
    g,
    weights,
    sums,
    tokens,
    share,
    d,
    eps,
    x_b,
    x_t,
    x_d,
    g_b,
    g_t,
    g_d,
    weights_b,
    weights_t,
    CENTRE: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Gradients of weight and bias, summed over ``share`` tokens: ``[1 or 2, B, C, d]``."""
    part, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    features = tl.arange(0, FEATURES)
    x += sample * x_b + features.to(tl.int64)[None, :] * x_d
    g += sample * g_b + features.to(tl.int64)[None, :] * g_d
    weights += sample * weights_b
    first = part * share
    last = tl.minimum(first + share, tokens)
    known = (features < d)[None, :]
    scale_sum = tl.zeros((ROWS, FEATURES), dtype=tl.float32)
    bias_sum = tl.zeros((ROWS, FEATURES), dtype=tl.float32)
    for start in tl.range(first, last, ROWS):
        places = start + tl.arange(0, ROWS)
        inside = places < last
        mask = inside[:, None] & known
        row = places.to(tl.int64)[:, None]
        value = tl.load(x + row * x_t, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(g + row * g_t, mask=mask, other=0.0).to(tl.float32)
        if MASK:
            weight = _weight(weights, places, weights_t, inside)[:, None]
            value = tl.where(weight != 0, value, 0.0)
            grad = tl.where(weight != 0, grad * weight, 0.0)
        if CENTRE:
            mean = tl.sum(value, 1)[:, None] / d
            value = tl.where(known, value - mean, 0.0)
        variance = tl.sum(value * value, 1)[:, None] / d
        variance = tl.where(inside[:, None], variance + eps, 1.0)
        scale_sum += grad * value * tl.rsqrt(variance)
        if BIAS:
            bias_sum += grad
    parts = tl.num_programs(0)
    place = ((sample * parts + part) * d).to(tl.int64) + features
    tl.store(sums + place, tl.sum(scale_sum, 0), mask=features < d)
    if BIAS:
        place += tl.num_programs(1).to(tl.int64) * parts * d
        tl.store(sums + place, tl.sum(bias_sum, 0), mask=features < d)


def bias_norm_sq(backprops: Tensor, mask: Tensor | None = None) -> Tensor:
    """``||sum_t G_it||^2`` for each sample: the gradient of a bias.

    Args:
        backprops: ``[B, T, p]``, bf16, fp16 or fp32, any strides.
        mask: ``[B, T]``: bool (which tokens count) or weights that multiply a token's
            gradient. Masked tokens may be NaN.

    Returns:
        ``[B]`` in fp32.
    """
    check_dtype(backprops)
    if backprops.dim() != 3:
        raise ValueError(f"backprops must be [B, T, p], got {list(backprops.shape)}")
    weights = check_mask(mask, backprops)
    batch, tokens, p = backprops.shape
    if batch == 0:
        return operands.blank((0,), backprops.device)
    blocks = max(1, operands.parts(p, COLUMNS))
    partial = operands.blank((batch, blocks), backprops.device)
    _sum_variant(weights is not None)(
        (blocks, batch),
        backprops,
        backprops if weights is None else weights,
        partial,
        tokens,
        p,
        *backprops.stride(),
        *(operands.NO_STRIDES if weights is None else weights.stride()),
    )
    return partial.sum(1)


@functools.cache
def _sum_variant(mask: bool) -> Variant:
    return Variant(_sum_kernel, MASK=mask, TOKENS=TOKENS, COLUMNS=COLUMNS, num_warps=4)


def affine_norm_sq(
    inputs: Tensor,
    backprops: Tensor,
    *,
    eps: float,
    centre: bool,
    bias: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Squared gradient norms of a normalisation layer's weight and bias.

    Args:
        inputs: ``[B, T, d]`` what the layer normalised, over d.
        backprops: ``[B, T, d]``.
        eps: What the layer adds to the variance or mean square.
        centre: Whether the mean is subtracted: LayerNorm does, RMSNorm does not.
        bias: Whether the layer has a bias.
        mask: As in :func:`bias_norm_sq`.

    Returns:
        ``[B]`` in fp32 of the weight and of the bias, ``None`` without one.

    Raises:
        ValueError: More features than one program holds.
    """
    sums = _affine_parts(inputs, backprops, eps, centre, bias, mask)
    kinds, batch, parts, d = sums.shape
    norms = bias_norm_sq(sums.view(kinds * batch, parts, d)).view(kinds, batch)
    return norms[0], norms[1] if bias else None


def affine_grads(
    inputs: Tensor, backprops: Tensor, *, eps: float, centre: bool, bias: bool
) -> Tensor:
    """Per-sample gradients of a normalisation layer's weight and bias, see :func:`affine_norm_sq`.

    Returns:
        ``[1 or 2, B, d]`` in fp32: of the weight, and of the bias if there is one.

    Raises:
        ValueError: More features than one program holds.
    """
    return _affine_parts(inputs, backprops, eps, centre, bias, None).sum(2)


def _affine_parts(
    inputs: Tensor, backprops: Tensor, eps: float, centre: bool, bias: bool, mask: Tensor | None
) -> Tensor:
    """``[1 or 2, B, C, d]``: the gradients, each as a sum of C parts."""
    x, g = check_pair(inputs, backprops)
    batch, tokens, d = x.shape
    if g.shape[2] != d or d > MOST_FEATURES:
        raise ValueError(
            f"backprops must have the {d} features of the input, at most {MOST_FEATURES}; got "
            f"{g.shape[2]}"
        )
    weights = check_mask(mask, g)
    kinds = 2 if bias else 1
    if x.numel() == 0:
        return g.new_zeros((kinds, batch, 1, d), dtype=torch.float32)
    features = operands.power_of_two(d, 16)
    rows = min(max(1, ROW_NUMBERS // features), 16, operands.power_of_two(tokens))
    parts = operands.parts(PROGRAMS * operands.multiprocessors(g.device), batch)
    share = max(rows, operands.parts(tokens, parts))
    parts = operands.parts(tokens, share)
    sums = operands.blank((kinds, batch, parts, d), g.device)
    _affine_variant(centre, bias, weights is not None, rows, features)(
        (parts, batch),
        x,
        g,
        g if weights is None else weights,
        sums,
        tokens,
        share,
        d,
        float(eps),
        *x.stride(),
        *g.stride(),
        *(operands.NO_STRIDES if weights is None else weights.stride()),
    )
    return sums


@functools.lru_cache(maxsize=256)
def _affine_variant(centre: bool, bias: bool, mask: bool, rows: int, features: int) -> Variant:
    return Variant(
        _affine_kernel,
        CENTRE=centre,
        BIAS=bias,
        MASK=mask,
        ROWS=rows,
        FEATURES=features,
        num_warps=min(32, max(4, features * rows // 512)),
    )
