"""Philox4x32-10: four random words for each 128-bit counter and 64-bit key.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The GPU
kernel uses Triton's own implementation of it; this is the one for the CPU, and the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

LANES = 4  # words of a counter
ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


def philox(counter: Sequence[Words], key: Sequence[Words]) -> list[Words]:
    """The random words of many counters.

    Args:
        counter: Four arrays ``[N]``, the lowest word first.
        key: Two arrays that broadcast with them.

    Returns:
        Four arrays ``[N]``.
    """
    a, b, c, d = counter
    first, second = key
    with np.errstate(over="ignore"):
        for _ in range(ROUNDS):
            high_a, low_a = _multiply(a, _MULTIPLIERS[0])
            high_c, low_c = _multiply(c, _MULTIPLIERS[1])
            a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
            first, second = first + _WEYL[0], second + _WEYL[1]
    return [a, b, c, d]


def _multiply(words: Words, factor: np.uint64) -> tuple[Words, Words]:
    """High and low half of the product."""
    product = words.astype(np.uint64) * factor
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)
