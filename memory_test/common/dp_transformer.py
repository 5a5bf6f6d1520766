"""A transformer for private training: separate projections, fused attention.

Shapes: B samples, T tokens, E features, H heads, V tokens in the vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def flash_attention_function() -> Callable[..., Tensor] | None:
    """``flash_attn_func`` of the package ``flash_attn``; ``None`` if it cannot be imported."""
    try:
        return importlib.import_module("flash_attn").flash_attn_func
    except (ImportError, AttributeError, OSError):  # OSError: built for another torch
        return None


class DPMultiheadAttentionWithFlashAttention(nn.Module):
    """Self-attention whose projections are four linear layers, with fused attention between.

    ``nn.MultiheadAttention`` keeps queries, keys and values in one packed parameter that bypasses
    its layer, so its per-sample gradients cannot be seen. Here each projection is an ``nn.Linear``,
    and what happens between them has no parameters: it runs in ``flash_attn`` (arXiv:2307.08691)
    where that is installed and can handle the tensors, else in torch's
    ``scaled_dot_product_attention``.

    Args:
        embed_dim: Number of features E; a multiple of ``num_heads``.
        num_heads: Number of heads H.
        dropout: Probability of dropout of attention weights, in training mode.
        bias: Whether the projections have biases.
        causal: Whether a token attends to itself and earlier ones only.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__()
        if num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                "embed_dim must be a multiple of num_heads, got "
                f"embed_dim={embed_dim}, num_heads={num_heads}"
            )
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self._flash = flash_attention_function()

    def forward(self, x: Tensor) -> Tensor:
        """Attended ``[B, T, E]`` from ``x`` ``[B, T, E]``."""
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.num_heads, -1)  # [B, T, H, E / H]
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(self._attend(q, k, v).reshape(batch, length, -1))

    def uses_flash_attention(self, q: Tensor) -> bool:
        """Whether ``flash_attn`` is used for queries like ``q``: on a GPU, in half precision."""
        return self._flash is not None and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.uses_flash_attention(q):
            assert self._flash is not None
            return self._flash(q, k, v, dropout_p=dropout, causal=self.causal)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, E / H]
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return attended.transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer network, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = DPMultiheadAttentionWithFlashAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` from ``[B, T, E]``."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class DPTransformer(nn.Module):
    """A causal language model, or a classifier of the mean of its last states.

    Args:
        vocab_size: Number of tokens V.
        width: Number of features E.
        depth: Number of blocks.
        heads: Number of heads H.
        max_length: Largest T.
        classes: Number of classes, or ``None`` for a language model.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        depth: int,
        heads: int,
        max_length: int,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.checkpointing = False
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size if classes is None else classes, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits ``[B, T, V]``, or ``[B, classes]``, from token numbers ``[B, T]``."""
        if position_ids is None:
            # Expanded: the gradients of samples can be told apart only if each has its row.
            length = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = length.expand_as(input_ids).contiguous()
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        x = self.norm(x)
        return self.head(x if self.classes is None else x.mean(1))
