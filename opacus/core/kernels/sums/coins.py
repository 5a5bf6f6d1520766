"""Coins of :mod:`opacus.core.kernels.sums.float8`, and where each lies; see Note [Coins] there."""

from __future__ import annotations

import torch
from torch import Tensor

from opacus.core.kernels.noise.words import key_words, random_words

LANE, BYTES = 512, 16
TILE = LANE * BYTES


def coins(first: int, count: int, key: bytes, number: int) -> Tensor:
    """``[count, TILE]`` numbers in [0, 1), multiples of 1/256, of the tiles from ``first`` on."""
    blocks = torch.arange(first * LANE, (first + count) * LANE, device="cpu")
    words = random_words(blocks, key_words(key), number, secure=False).view(count, LANE, 4)
    by_place = torch.stack([words >> 8 * place & 0xFF for place in range(4)])
    return by_place.permute(1, 0, 3, 2).reshape(count, TILE) / 256.0  # [count, 4, 4, LANE]
