"""The model that is profiled: a causal language model with ``DPMultiheadAttention``.

Shapes: B samples, T tokens, E features, H heads, V tokens in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opacus.layers import DPMultiheadAttention


@dataclass(frozen=True)
class Shape:
    """Size of a model.

    Attributes:
        vocab: Number of tokens V in the vocabulary.
        width: Number of features E.
        depth: Number of blocks.
        heads: Number of heads H.
        max_length: Largest T.
    """

    vocab: int
    width: int
    depth: int
    heads: int
    max_length: int


SMALL = Shape(vocab=1024, width=128, depth=4, heads=4, max_length=512)  # 1.1M parameters
LARGE = Shape(vocab=32000, width=2048, depth=18, heads=16, max_length=1024)  # 1.04B


class Block(nn.Module):
    """Causal attention and a two-layer network, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = DPMultiheadAttention(width, heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``[B, T, E]`` from ``x`` ``[B, T, E]`` and the causal ``mask`` ``[T, T]``."""
        y = self.attention_norm(x)
        # Without attention weights to return, torch's fused attention is used.
        attended, _ = self.attention(y, y, y, need_weights=False, attn_mask=mask, is_causal=True)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class ProfiledTransformer(nn.Module):
    """Embeddings of tokens and positions, blocks, a head that is not tied to the embedding.

    Args:
        shape: Size of the model.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.max_length, shape.width)
        self.layers = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` from token numbers ``[B, T]``.

        Raises:
            ValueError: T is larger than ``max_length``.
        """
        length = input_ids.shape[1]
        if length > self.shape.max_length:
            raise ValueError(
                f"{length} tokens, but the model has {self.shape.max_length} positions"
            )
        place = torch.arange(length, device=input_ids.device)
        # One row a sample: the gradients of samples can be told apart only then.
        x = self.tokens(input_ids) + self.positions(place.expand_as(input_ids).contiguous())
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def build_model(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model with the weights that ``seed`` stands for, made where it will live."""
    torch.manual_seed(seed)
    with device:
        return ProfiledTransformer(shape).to(dtype)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())
