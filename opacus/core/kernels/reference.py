"""Norm computations in plain PyTorch, exact, with bounded memory.

Letters: B samples, T tokens, d and p features, V rows of a table.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Largest intermediate result, in elements (256 MB of fp32).
CHUNK_ELEMENTS = 1 << 26
# What writing and reading one element of an intermediate result costs, in the
# multiply-adds that the matrix units do in that time.
ELEMENT_COST = 64


def widen(tensor: Tensor) -> Tensor:
    """At least fp32: sums of squares of half precision over- and underflow."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def sum_of_squares(tensor: Tensor) -> Tensor:
    """``[B, ...] -> [B]``, accumulated in at least fp32."""
    wide = widen(tensor)
    if wide.numel() == 0:
        return wide.new_zeros(wide.shape[0])
    return wide.reshape(wide.shape[0], -1).square().sum(1)


def product_norm_sq(activations: Tensor, backprops: Tensor) -> Tensor:
    """``||A_i^T G_i||_F^2`` for each sample, the norm of a linear layer's weight gradient.

    Args:
        activations: ``[B, T, d]``.
        backprops: ``[B, T, p]``, same dtype.

    Returns:
        ``[B]`` in fp32 (fp64 for fp64).
    """
    batch, tokens, d = activations.shape
    p = backprops.shape[2]
    if batch == 0 or tokens == 0:
        return widen(backprops.new_zeros(batch))
    if tokens == 1:
        return sum_of_squares(activations) * sum_of_squares(backprops)
    if gram_is_cheaper(tokens, d, p):
        return gram_norm_sq(activations, backprops)
    return width_norm_sq(activations, backprops)


def gram_is_cheaper(tokens: int, d: int, p: int) -> bool:
    """Whether Gram matrices cost less than the product ``A^T G``."""
    gram = tokens * tokens * (d + p + ELEMENT_COST)
    width = tokens * d * p + ELEMENT_COST * d * p
    return gram < width


def width_norm_sq(activations: Tensor, backprops: Tensor) -> Tensor:
    """:func:`product_norm_sq` by forming ``A^T G`` a few columns at a time."""
    batch, _, d = activations.shape
    total = widen(backprops.new_zeros(batch))
    step = max(1, CHUNK_ELEMENTS // max(1, batch * d))
    for part in backprops.split(step, dim=2):
        total = total + sum_of_squares(_bmm(part.transpose(1, 2), activations))
    return total


def gram_norm_sq(activations: Tensor, backprops: Tensor) -> Tensor:
    """:func:`product_norm_sq` as ``sum_ts (A A^T)_ts (G G^T)_ts``, a few rows at a time."""
    batch, tokens, _ = activations.shape
    total = widen(backprops.new_zeros(batch))
    step = max(1, CHUNK_ELEMENTS // max(1, batch * tokens))
    a_t, g_t = activations.transpose(1, 2), backprops.transpose(1, 2)
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        # Both Gram matrices are symmetric: columns before ``start`` were counted twice.
        gram = _bmm(activations[:, rows], a_t[:, :, start:])
        gram = gram * _bmm(backprops[:, rows], g_t[:, :, start:])
        square = gram.shape[1]
        total = total + gram[:, :, :square].sum((1, 2)) + 2 * gram[:, :, square:].sum((1, 2))
    # Rounding can leave a tiny negative number where the norm is zero.
    return total.clamp(min=0)


def table_norm_sq(ids: Tensor, backprops: Tensor) -> Tensor:
    """Squared norm of each sample's gradient of a table, repeated rows added first.

    Args:
        ids: ``[B, T]`` rows that were looked up.
        backprops: ``[B, T, d]``.

    Returns:
        ``[B]`` in fp32 (fp64 for fp64). Memory is O(B T d), whatever the table's size,
        and nothing waits for the device.
    """
    batch, tokens, d = backprops.shape
    if batch == 0 or tokens == 0:
        return widen(backprops.new_zeros(batch))
    ordered, order = ids.sort(dim=1)
    fresh = torch.ones_like(ordered, dtype=torch.long)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    slots = torch.empty_like(fresh).scatter_(1, order, fresh.cumsum(1) - 1)
    slots = (slots + tokens * torch.arange(batch, device=ids.device)[:, None]).reshape(-1)
    total = widen(backprops.new_zeros(batch))
    step = max(1, CHUNK_ELEMENTS // max(1, batch * tokens))
    for part in backprops.split(step, dim=2):
        sums = widen(part.new_zeros(batch * tokens, part.shape[2]))
        sums.index_add_(0, slots, widen(part).reshape(batch * tokens, -1))
        total = total + sum_of_squares(sums.view(batch, -1))
    return total


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """Batched product with an fp32 result (fp64 for fp64) and no half-precision rounding."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
