"""GPU kernels of :mod:`opacus.core.kernels.loss.head`: each reads a part's logits once."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from opacus.core.kernels.host.launch import Variant

BLOCK = 2048


@triton.jit
def _accumulate_kernel(logits, targets, state, tokens, columns, start, BLOCK: tl.constexpr):
    """One token: the part's largest logit, sum of exponentials and sum, in one pass."""
    token = tl.program_id(0).to(tl.int64)
    own = logits + token * columns
    place = tl.load(targets + token) - start
    largest = tl.full((), -float("inf"), tl.float32)
    exponentials = tl.zeros((), tl.float32)
    total = tl.zeros((), tl.float32)
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < columns
        value = tl.load(own + places, mask=inside, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value, axis=0))
        # Of minus infinity alone there is nothing to subtract.
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        exponentials = exponentials * tl.exp(largest - shift)
        exponentials += tl.sum(tl.exp(value - shift), axis=0)
        total += tl.sum(tl.where(inside, value, 0.0), axis=0)
        largest = larger
    before = tl.load(state + token)
    larger = tl.maximum(before, largest)
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    both = tl.exp(before - shift) + exponentials * tl.exp(largest - shift)
    tl.store(state + token, shift + tl.log(both))
    hit = (place >= 0) & (place < columns)
    picked = tl.load(own + place, mask=hit, other=0.0).to(tl.float32)
    line = state + tokens
    tl.store(line + token, tl.load(line + token) + picked)
    line += tokens
    tl.store(line + token, tl.load(line + token) + total)


@triton.jit
def _differentiate_kernel(
    logits,
    targets,
    lse,
    grads,
    columns,
    start,
    even,
    hot,
    twice_z,
    BLOCK: tl.constexpr,
):
    """Logits become gradients in their place; ``even`` is what smoothing takes of each."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < columns
    own = logits + token * columns + places
    grad = tl.load(grads + token)
    log_sum = tl.load(lse + token)
    value = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    value = tl.exp(value - log_sum) * (grad * (1.0 + twice_z * log_sum)) - grad * even
    value -= tl.where(places == tl.load(targets + token) - start, grad * hot, 0.0)
    value = tl.where(grad == 0.0, 0.0, value)
    tl.store(own, value.to(logits.dtype.element_ty), mask=inside)


def accumulate(logits: Tensor, targets: Tensor, state: Tensor, start: int) -> None:
    """Take a part's logits into the state of the losses.

    Args:
        logits: ``[N, c]``, contiguous, at most fp32.
        targets: ``[N]`` int64.
        state: ``[3, N]`` fp32, contiguous: log-sum-exp, logit of the target, sum of logits.
        start: Row of the head that column 0 is of.
    """
    tokens, columns = logits.shape
    if logits.numel():
        _accumulates()((tokens,), logits, targets, state, tokens, columns, start)


def differentiate(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grads: Tensor,
    smoothing: float,
    z_loss: float,
    start: int,
    vocabulary: int,
) -> None:
    """Overwrite a part's logits ``[N, c]`` with the gradient with respect to them.

    Args:
        logits: ``[N, c]``, contiguous, at most fp32.
        targets: ``[N]`` int64.
        lse: ``[N]`` fp32.
        grads: ``[N]`` fp32, of the tokens' losses.
        smoothing: Of the losses' options.
        z_loss: The same.
        start: Row of the head that column 0 is of.
        vocabulary: Rows V of the head.
    """
    tokens, columns = logits.shape
    if not logits.numel():
        return
    even, hot = smoothing / vocabulary, 1.0 - smoothing
    _differentiates()(
        (tokens, triton.cdiv(columns, BLOCK)),
        *(logits, targets, lse, grads, columns, start, even, hot, 2.0 * z_loss),
    )


@functools.cache
def _accumulates() -> Variant:
    return Variant(_accumulate_kernel, BLOCK=BLOCK, num_warps=8)


@functools.cache
def _differentiates() -> Variant:
    return Variant(_differentiate_kernel, BLOCK=BLOCK, num_warps=8)
