"""Random words of many counters, from Philox or ChaCha20, on the CPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opacus.core.kernels.noise import chacha, philox

Words = NDArray[np.uint32]
Numbers = NDArray[np.uint64]


def lanes(secure: bool) -> int:
    """How many words one counter makes."""
    return chacha.LANES if secure else philox.LANES


def random_words(blocks: Numbers, keys: Words, step: int, secure: bool) -> Words:
    """``[N, lanes]`` words of the counters (block, step).

    Args:
        blocks: ``[N]``, the lower 64 bits of the counters.
        keys: ``[N, 8]``, or ``[1, 8]`` for all of them; Philox uses the first two words.
        step: The higher 64 bits.
        secure: ChaCha20 instead of Philox.
    """
    counter = [half for whole in (blocks, np.full_like(blocks, step)) for half in _halves(whole)]
    if secure:
        return np.stack(chacha.chacha20(counter, list(keys.T)), axis=1)
    return np.stack(philox.philox(counter, [keys[:, 0], keys[:, 1]]), axis=1)


def words_between(start: int, end: int, key: bytes, step: int, secure: bool) -> Words:
    """The words number ``start`` to ``end - 1`` of a stream.

    Args:
        key: 32 bytes.
    """
    many = lanes(secure)
    blocks = np.arange(start // many, -(-end // many), dtype=np.uint64)
    keys = np.frombuffer(key, dtype="<u4")[None, :]
    first = start % many
    return random_words(blocks, keys, step, secure).reshape(-1)[first : first + end - start]


def _halves(numbers: Numbers) -> tuple[Words, Words]:
    return numbers.astype(np.uint32), (numbers >> np.uint64(32)).astype(np.uint32)
