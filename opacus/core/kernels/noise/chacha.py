"""ChaCha20 (RFC 8439): sixteen random words for each 128-bit counter and 256-bit key.

The counter takes the place of the RFC's block counter and nonce, which are the last four words of
the cipher's state. This is the version for the CPU, and the GPU kernel's reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

LANES = 16  # words of a counter
DOUBLE_ROUNDS = 10
_CONSTANTS = np.array([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], dtype=np.uint32)
# Place of each word of a row once the rows are turned into diagonals, and back.
_TURNS = [np.roll(np.arange(4), -places) for places in range(4)]


def chacha20(counter: Sequence[Words], key: Sequence[Words]) -> list[Words]:
    """The random words of many counters.

    Args:
        counter: Four arrays ``[N]``, the lowest word first.
        key: Eight arrays that broadcast with them.

    Returns:
        Sixteen arrays ``[N]``.
    """
    count = len(counter[0])
    start = np.empty((4, 4, count), dtype=np.uint32)  # the cipher's square, for each counter
    start[0] = _CONSTANTS[:, None]
    for place, word in enumerate(key):
        start[1 + place // 4, place % 4] = word
    for place, word in enumerate(counter):
        start[3, place] = word
    rows = list(start.copy())
    with np.errstate(over="ignore"):
        for _ in range(DOUBLE_ROUNDS):
            _quarter_rounds(rows)
            rows = [row[_TURNS[places]] for places, row in enumerate(rows)]
            _quarter_rounds(rows)
            rows = [row[_TURNS[-places % 4]] for places, row in enumerate(rows)]
        return list((np.stack(rows) + start).reshape(LANES, count))


def _quarter_rounds(rows: list[Words]) -> None:
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
        low = turned >> np.uint32(32 - distance)
        turned <<= np.uint32(distance)
        turned |= low
