"""Sizes of Llama models, and their layers as modules without memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LlamaShape:
    """A Llama model with an untied head.

    Attributes:
        hidden: Width h.
        layers: Number of blocks L.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        mlp: Width m of the feed-forward layers.
        vocab: Number of tokens V.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 128256

    @property
    def kv(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        return sum(d * p for d, p in linears(self)) + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Outside the blocks: embedding, head, last norm."""
        return 2 * self.vocab * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.block_parameters + self.root_parameters

    @property
    def multiplied(self) -> int:
        """Parameters of all matrix products: a token costs as many multiply-adds forward."""
        return self.layers * sum(d * p for d, p in linears(self)) + self.vocab * self.hidden

    @property
    def activation_bytes_of_block(self) -> int:
        """Saved by autograd for a token of a block, half precision, norms in fp32."""
        norms = 2 * (4 + 2) * self.hidden  # the input in fp32, and normalised
        inputs = 2 * 2 * self.hidden  # of the projections and of the feed-forward layers
        attention = 2 * (2 * self.hidden + 2 * self.kv)  # q, k, v and the result
        feed_forward = 4 * 2 * self.mlp  # gate, its activation, up, their product
        return norms + inputs + attention + feed_forward

    @property
    def logit_bytes(self) -> int:
        """One copy of a token's logits in half precision."""
        return 2 * self.vocab

    @property
    def last_bytes(self) -> int:
        """Saved for a token after the blocks: the last norm and the head's input."""
        return (4 + 2 + 2) * self.hidden


SHAPES: dict[str, LlamaShape] = {
    "llama3-1b": LlamaShape(2048, 16, 32, 8, 8192),
    "llama3-3b": LlamaShape(3072, 28, 24, 8, 8192),
    "llama3-8b": LlamaShape(4096, 32, 32, 8, 14336),
    "llama3-70b": LlamaShape(8192, 80, 64, 8, 28672),
    "llama3-405b": LlamaShape(16384, 126, 128, 8, 53248),
}


def shape_of(name: str) -> LlamaShape:
    """The shape of this name.

    Raises:
        ValueError: There is none.
    """
    if name not in SHAPES:
        raise ValueError(f"model must be one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]


@functools.cache
def linears(shape: LlamaShape) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs ``(d, p)`` of the linear layers of a block."""
    block = block_on_meta(shape)
    return tuple(
        (m.in_features, m.out_features) for m in block.modules() if isinstance(m, nn.Linear)
    )


def block_on_meta(shape: LlamaShape) -> nn.ModuleDict:
    """The layers of one block on the meta device, which allocates nothing."""
    h, kv, m = shape.hidden, shape.kv, shape.mlp
    sizes = {"q": (h, h), "k": (h, kv), "v": (h, kv), "o": (h, h),
             "gate": (h, m), "up": (h, m), "down": (m, h)}  # fmt: skip
    return nn.ModuleDict(
        {n: nn.Linear(d, p, bias=False, device="meta") for n, (d, p) in sizes.items()}
    )
