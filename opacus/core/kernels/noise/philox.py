"""Philox4x32-10: four random words for each 128-bit counter and 64-bit key.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The GPU
kernel uses Triton's own implementation of it; this is the one for the CPU, and the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

LANES = 4  # words of a counter
ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """The random words of many counters. Words are int64 in [0, 2^32).

    Args:
        counter: Four tensors ``[N]``, the lowest word first.
        key: Two tensors that broadcast with them.

    Returns:
        Four tensors ``[N]``.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        high_a, low_a = _multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _multiply(c, _MULTIPLIERS[1])
        a, b = high_c.bitwise_xor_(b).bitwise_xor_(first), low_c
        c, d = high_a.bitwise_xor_(d).bitwise_xor_(second), low_a
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return [a, b, c, d]


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low half of the product; in an int64 the lower 64 bits are right."""
    product = words * factor
    return (product >> 32).bitwise_and_(_WORD), product.bitwise_and_(_WORD)
