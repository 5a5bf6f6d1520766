"""ChaCha20 (RFC 8439): sixteen random words for each 128-bit counter and 256-bit key.

The counter takes the place of the RFC's block counter and nonce, which are the last four words of
the cipher's state. This is the version for the CPU, and the GPU kernel's reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LANES = 16  # words of a counter
DOUBLE_ROUNDS = 10
_CONSTANTS = 0x61707865, 0x3320646E, 0x79622D32, 0x6B206574
_WORD = 0xFFFFFFFF


def chacha20(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """The random words of many counters. Words are int64 in [0, 2^32).

    Args:
        counter: Four tensors ``[N]``, the lowest word first.
        key: Eight tensors that broadcast with them.

    Returns:
        Sixteen tensors ``[N]``.
    """
    like = counter[0]
    # The cipher's square [4, 4, N]; in int32, where sums wrap as they must.
    start = torch.empty(4, 4, len(like), dtype=torch.int32, device=like.device)
    words: list[Tensor | int] = [*_CONSTANTS, *key, *counter]
    for place, word in enumerate(words):
        start[place // 4, place % 4] = word
    rows = list(start.clone().unbind(0))
    for _ in range(DOUBLE_ROUNDS):
        _quarter_rounds(rows)
        rows = [row.roll(-places, 0) for places, row in enumerate(rows)]
        _quarter_rounds(rows)
        rows = [row.roll(places, 0) for places, row in enumerate(rows)]
    block = (torch.stack(rows) + start).long() & _WORD
    return list(block.view(LANES, -1).unbind(0))


def _quarter_rounds(rows: list[Tensor]) -> None:
    """The four quarter rounds of the columns, in place."""
    a, b, c, d = rows
    for target, other, turned, distance in (
        (a, b, d, 16),
        (c, d, b, 12),
        (a, b, d, 8),
        (c, d, b, 7),
    ):
        target += other
        turned ^= target
        low = (turned >> (32 - distance)).bitwise_and_((1 << distance) - 1)  # it is signed
        turned <<= distance
        turned |= low
