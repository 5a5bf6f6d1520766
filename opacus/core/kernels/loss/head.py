"""Cross-entropy of ``hidden @ weight.T + bias``, a part of the vocabulary at a time: no logits.

A part's logits ``[B, T, c]`` are computed, used and dropped. Since the sum over tokens is complete
for the rows of that part, so are those rows of each unit's gradient of the head: their squared
norms add up over the parts, exactly.

Letters: B units, T tokens, d features, V rows of the head, c of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import sum_of_squares, wide_bmm, wide_dtype, widen
from opacus.core.kernels.norms.tied import at_rows
from opacus.core.kernels.sums.weighted_sum import triton_works
from opacus.core.platform.sizes import PART_ELEMENTS


@dataclass(frozen=True)
class LossOptions:
    """The loss of a token's logits ``l`` with target ``t``.

    ``(1 - smoothing) * (lse - l_t) + smoothing * (lse - mean(l)) + z_loss * lse ** 2``, where
    ``lse = logsumexp(l)``; 0 where ``t == ignore_index``.
    """

    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0


class Head(NamedTuple):
    """One use of a head.

    Attributes:
        hidden: ``[B, T, d]``, its input.
        weight: ``[V, d]``.
        bias: ``[V]`` or ``None``.
        targets: ``[B, T]`` integers.
        lse: ``[B, T]``, the logarithm of the sum of the exponentials of all logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    lse: Tensor


@dataclass
class Wanted:
    """Outputs of one :func:`sweep` over the vocabulary; ``None`` is not computed.

    Attributes:
        hidden: ``[B, T, d]`` zeros, at least fp32: gradient of the hidden states.
        units: ``[B, V, d]``: each unit's gradient of the weight.
        units_bias: ``[B, V]``: of the bias.
        norm_sq: ``[B]`` zeros, at least fp32: squared norms of the weight's gradients.
        norm_sq_bias: ``[B]`` zeros: of the bias'.
        gram: ``[B, T, T]`` zeros, at least fp32: products of the tokens' logits' gradients.
        looked_up: ``[B, T, S]`` zeros, at least fp32: these gradients at the rows ``ids``.
        ids: ``[B, S]``, rows of the weight.
        total: ``[V, d]`` zeros, at least fp32: sum of the weight's gradients over units.
        total_bias: ``[V]`` zeros, at least fp32: of the bias'.
    """

    hidden: Tensor | None = None
    units: Tensor | None = None
    units_bias: Tensor | None = None
    norm_sq: Tensor | None = None
    norm_sq_bias: Tensor | None = None
    gram: Tensor | None = None
    looked_up: Tensor | None = None
    ids: Tensor | None = None
    total: Tensor | None = None
    total_bias: Tensor | None = None


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """The tokens' losses and :attr:`Head.lse`, both ``[B, T]``, at least fp32.

    Raises:
        IndexError: On a CPU: a target is not in the vocabulary. On a GPU its loss is NaN.
    """
    x, line = hidden.flatten(0, 1), targets.flatten()
    wide, vocabulary = wide_dtype(hidden), len(weight)
    state = x.new_zeros(3, len(line), dtype=wide)  # lse, logit of the target, sum of all logits
    lse, picked, sums = state
    lse.fill_(-torch.inf)
    for start, stop in _parts(vocabulary, len(line), _most(x.device)):
        logits = _logits(x, weight, bias, start, stop)
        if _fused(logits):
            from opacus.core.kernels.loss import head_triton

            head_triton.accumulate(logits, line, state, start)
        else:
            _accumulate(logits, line, state, start)
    ignored = line == options.ignore_index
    outside = ((line < 0) | (line >= vocabulary)) & ~ignored
    if not line.is_cuda and bool(outside.any()):
        raise IndexError(
            f"target {int(line[outside][0])} is not in the vocabulary of {vocabulary} tokens, and "
            f"not ignore_index = {options.ignore_index}"
        )
    lse.masked_fill_(outside, torch.nan)
    smoothing = options.smoothing
    losses = lse - (1 - smoothing) * picked - smoothing / max(1, vocabulary) * sums
    losses = losses + options.z_loss * lse.square() if options.z_loss else losses
    return losses.masked_fill_(ignored, 0.0).view(targets.shape), lse.view(targets.shape)


@torch.no_grad()
def sweep(head: Head, grads: Tensor, options: LossOptions, wanted: Wanted) -> None:
    """Fill in what is ``wanted``, in one pass over the vocabulary.

    Args:
        head: Its use.
        grads: ``[B, T]``, gradient with respect to the tokens' losses.
        options: Those of the losses.
        wanted: Is filled in.
    """
    if torch.is_autocast_enabled(grads.device.type):  # the backward pass may run under it
        with torch.autocast(grads.device.type, enabled=False):
            return sweep(head, grads, options, wanted)
    head = live(head, grads, options)
    grads = grads.masked_fill(head.targets == options.ignore_index, 0.0)
    hidden, most = head.hidden, _most(grads.device)
    if wanted.units is not None or wanted.norm_sq is not None:
        most = min(most, PART_ELEMENTS * grads.numel() // max(1, len(grads) * hidden.shape[-1]))
    for start, stop in _parts(len(head.weight), grads.numel(), most):
        logits = _logit_grads(head, grads, options, start, stop)  # [B, T, c]
        if wanted.hidden is not None:
            rows = wide_bmm(logits.view(1, -1, stop - start), head.weight[None, start:stop])
            wanted.hidden += rows.view(wanted.hidden.shape)
        _of_head(logits, hidden, wanted, slice(start, stop))


def live(head: Head, grads: Tensor, options: LossOptions) -> Head:
    """Zeros in the place of tokens that do not count, which may hold infinities."""
    dead = (grads == 0) | (head.targets == options.ignore_index)
    hidden = head.hidden.masked_fill(dead[..., None], 0.0)
    return head._replace(hidden=hidden, lse=head.lse.masked_fill(dead, 0.0))


def _of_head(logits: Tensor, hidden: Tensor, wanted: Wanted, part: slice) -> None:
    """The head's own gradients of one part; ``logits`` ``[B, T, c]`` are gradients."""
    turned = logits.transpose(1, 2)
    if wanted.units is not None:
        wanted.units[:, part] = torch.bmm(turned, hidden)
    elif wanted.norm_sq is not None:
        wanted.norm_sq += sum_of_squares(wide_bmm(turned, hidden))
    if wanted.gram is not None:
        wanted.gram += wide_bmm(logits, turned)
    if wanted.looked_up is not None and wanted.ids is not None:
        wanted.looked_up += at_rows(logits, wanted.ids, part.start)
    if wanted.total is not None:
        tokens = hidden.flatten(0, 1)
        wanted.total[part] = wide_bmm(logits.flatten(0, 1).t()[None], tokens[None])[0]
    if wanted.units_bias is None and wanted.norm_sq_bias is None and wanted.total_bias is None:
        return
    bias = logits.sum(1, dtype=wide_dtype(logits))
    if wanted.units_bias is not None:
        wanted.units_bias[:, part] = bias
    if wanted.norm_sq_bias is not None:
        wanted.norm_sq_bias += sum_of_squares(bias)
    if wanted.total_bias is not None:
        wanted.total_bias[part] = bias.sum(0)


def _most(device: torch.device) -> int:
    """Elements of a part's logits: more on a GPU with more memory, as each part is launched."""
    if device.type != "cuda":  # whose caches like small parts
        return PART_ELEMENTS
    return PART_ELEMENTS * max(1, torch.cuda.get_device_properties(device).total_memory >> 35)


def _parts(vocabulary: int, tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """Where parts of the vocabulary start and stop, each of at most so many logits."""
    if not tokens:
        return
    size = max(1, most // max(1, tokens))
    size = size // 128 * 128 if size > 128 else size
    for start in range(0, vocabulary, size):
        yield start, min(vocabulary, start + size)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    """``[N, c]`` in the dtype of ``x``, without autocast."""
    with torch.autocast(x.device.type, enabled=False):
        own = None if bias is None else bias[start:stop]
        return torch.nn.functional.linear(x, weight[start:stop], own)


def _fused(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64 and triton_works()


def _accumulate(logits: Tensor, targets: Tensor, state: Tensor, start: int) -> None:
    """Take a part's logits ``[N, c]`` into the state ``[3, N]`` of :func:`token_losses`."""
    logits = widen(logits)
    lse, picked, sums = state
    torch.logaddexp(lse, logits.logsumexp(1), out=lse)
    places = targets - start
    inside = (places >= 0) & (places < logits.shape[1])
    own = logits.gather(1, places.where(inside, 0)[:, None])[:, 0]
    picked += own.masked_fill(~inside, 0.0)
    sums += logits.sum(1)


def _logit_grads(head: Head, grads: Tensor, options: LossOptions, start: int, stop: int) -> Tensor:
    """Gradient ``[B, T, c]`` with respect to a part's logits, in the dtype of the hidden states."""
    shape = (*grads.shape, stop - start)
    logits = _logits(head.hidden.flatten(0, 1), head.weight, head.bias, start, stop)
    lse, targets, grads = head.lse.flatten(), head.targets.flatten(), grads.flatten()
    vocabulary = len(head.weight)
    if _fused(logits):
        from opacus.core.kernels.loss import head_triton

        smooth, z_loss = float(options.smoothing), float(options.z_loss)
        head_triton.differentiate(logits, targets, lse, grads, smooth, z_loss, start, vocabulary)
        return logits.view(shape)
    slope = grads * (1 + 2 * options.z_loss * lse)
    own = torch.exp(widen(logits) - lse[:, None]) * slope[:, None]
    own -= (grads * (options.smoothing / vocabulary))[:, None]
    places = targets - start
    inside = (places >= 0) & (places < stop - start)
    hit = (grads * (1 - options.smoothing)).masked_fill(~inside, 0.0)
    own.scatter_add_(1, places.where(inside, 0)[:, None], -hit[:, None])
    own.masked_fill_((grads == 0)[:, None], 0.0)
    return own.to(logits.dtype).view(shape)
