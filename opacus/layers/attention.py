"""The arithmetic of attention: masks, weights and the weighted sum of values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def merge_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """One additive mask from the two that attention takes.

    Args:
        attn_mask: ``[T, S]`` or ``[B * H, T, S]``; bool (true: do not attend) or float
            (added to the attention scores).
        key_padding_mask: ``[B, S]``; bool (true: ignore this key) or float.
        sizes: B samples, H heads, T queries, S keys.
        dtype: Floating dtype of the result.

    Returns:
        A mask that broadcasts to ``[B, H, T, S]``, or ``None`` if there was none.

    Raises:
        ValueError: A mask has the wrong shape.
        TypeError: A mask is neither bool nor floating.
    """
    batch, heads, queries, keys = sizes
    merged = None
    if attn_mask is not None:
        _check_shape("attn_mask", attn_mask, [(queries, keys), (batch * heads, queries, keys)])
        merged = _additive("attn_mask", attn_mask, dtype)
        per_sample = attn_mask.dim() == 3
        merged = merged.view(*((batch, heads) if per_sample else (1, 1)), queries, keys)
    if key_padding_mask is not None:
        _check_shape("key_padding_mask", key_padding_mask, [(batch, keys)])
        padding = _additive("key_padding_mask", key_padding_mask, dtype)
        padding = padding.view(batch, 1, 1, keys)
        merged = padding if merged is None else merged + padding
    return merged


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    """Attention without its weights, by torch's fused kernels where it has one.

    Args:
        query: ``[B, H, T, head_dim]``.
        key: ``[B, H, S, head_dim]``.
        value: ``[B, H, S, head_dim]``.
        mask: Additive, broadcasts to ``[B, H, T, S]``.
        dropout: Probability of dropout of attention weights.
        causal: Whether a query attends only to keys up to its own position.

    Returns:
        ``[B, H, T, head_dim]``.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal
    )


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: nn.Module
) -> tuple[Tensor, Tensor]:
    """As :func:`attend`; returns the attention weights ``[B, H, T, S]`` too, after dropout."""
    scores = (query * (1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    weights = dropout(torch.softmax(scores, dim=-1))
    return weights @ value, weights


def _check_shape(name: str, mask: Tensor, allowed: list[tuple[int, ...]]) -> None:
    if tuple(mask.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in allowed)
        raise ValueError(f"{name} must have shape {shapes}, got {tuple(mask.shape)}")


def _additive(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"{name} must be bool or floating, got {mask.dtype}")
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(mask.bool(), -math.inf)
