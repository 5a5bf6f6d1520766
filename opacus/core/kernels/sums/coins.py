"""Coins of :mod:`opacus.core.kernels.sums.float8`, and where each lies; see Note [Coins] there."""

from __future__ import annotations

import torch
from torch import Tensor

from opacus.core.kernels.noise.words import key_words, random_words

LANE, BYTES = 512, 16
TILE = LANE * BYTES


def coins(first: int, key: bytes, number: int) -> Tensor:
    """``[TILE]`` numbers in [0, 1), multiples of 1/256, of the counters from ``first`` on."""
    blocks = torch.arange(first, first + LANE, device="cpu")
    words = random_words(blocks, key_words(key), number, secure=False)  # [LANE, 4]
    by_place = [words >> 8 * place & 0xFF for place in range(4)]
    return torch.stack(by_place).permute(0, 2, 1).reshape(TILE) / 256.0  # [4, 4, LANE]
