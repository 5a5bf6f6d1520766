"""Random words of many counters, from Philox or ChaCha20, on the CPU."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from opacus.core.kernels.noise import chacha, philox


def lanes(secure: bool) -> int:
    """Number of words that one counter makes."""
    return chacha.LANES if secure else philox.LANES


def random_words(blocks: Tensor, keys: Tensor, step: int, secure: bool) -> Tensor:
    """``[N, lanes]`` int64 words in [0, 2^32) of the counters (block, step).

    Args:
        blocks: ``[N]`` int64, the lower 64 bits of the counters.
        keys: ``[N, 8]``, or ``[1, 8]`` for all of them; Philox uses the first two words.
        step: The higher 64 bits.
        secure: ChaCha20 instead of Philox.
    """
    counter = [half for whole in (blocks, torch.full_like(blocks, step)) for half in _halves(whole)]
    if secure:
        return torch.stack(chacha.chacha20(counter, keys.unbind(1)), dim=1)
    return torch.stack(philox.philox(counter, keys[:, :2].unbind(1)), dim=1)


def key_words(*keys: bytes) -> Tensor:
    """``[K, 8]`` from 32 bytes each."""
    return torch.tensor([struct.unpack("<8I", key) for key in keys], device="cpu")


def words_between(start: int, end: int, key: bytes, step: int, secure: bool) -> Tensor:
    """The words number ``start`` to ``end - 1`` of a stream, int64 in [0, 2^32).

    Args:
        key: 32 bytes.
    """
    many = lanes(secure)
    blocks = torch.arange(start // many, -(-end // many), device="cpu")
    words = random_words(blocks, key_words(key), step, secure).view(-1)
    return words[start % many : start % many + end - start]


def _halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    return numbers & 0xFFFFFFFF, (numbers >> 32) & 0xFFFFFFFF
