"""ChaCha20 for GPU kernels; the definition is in :mod:`opacus.core.kernels.noise.chacha`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn(x, DISTANCE: tl.constexpr):
    return (x << DISTANCE) | (x >> (32 - DISTANCE))


@triton.jit
def _quarter_round(a, b, c, d, one):
    """Half of the sums are ``b * one + a``: multiply-adds run beside the bit operations."""
    a = b * one + a
    d = _turn(d ^ a, 16)
    c += d
    b = _turn(b ^ c, 12)
    a = b * one + a
    d = _turn(d ^ a, 8)
    c += d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _key_words(key, like):
    """Both words of one of the four numbers of the key, as wide as ``like``."""
    both = tl.load(key)
    return like * 0 + both.to(tl.uint32), like * 0 + (both >> 32).to(tl.uint32)


@triton.jit
def chacha20(n0, n1, n2, n3, key):  # noqa: ANN201
    """Sixteen words ``[N]`` of the counters, whose words are ``[N]`` uint32, the lowest first.

    ``key`` points to four int64, two words each. The highest bit of ``n3`` is 0.
    """
    k0, k1 = _key_words(key, n0)
    k2, k3 = _key_words(key + 1, n0)
    k4, k5 = _key_words(key + 2, n0)
    k6, k7 = _key_words(key + 3, n0)
    a0, a1, a2, a3 = (
        n0 * 0 + 0x61707865,
        n0 * 0 + 0x3320646E,
        n0 * 0 + 0x79622D32,
        n0 * 0 + 0x6B206574,
    )
    b0, b1, b2, b3, c0, c1, c2, c3 = k0, k1, k2, k3, k4, k5, k6, k7
    d0, d1, d2, d3 = n0, n1, n2, n3
    one = (n3 >> 31) + 1  # the compiler cannot tell that this is 1: steps are below 2^63
    for _ in tl.static_range(10):
        a0, b0, c0, d0 = _quarter_round(a0, b0, c0, d0, one)
        a1, b1, c1, d1 = _quarter_round(a1, b1, c1, d1, one)
        a2, b2, c2, d2 = _quarter_round(a2, b2, c2, d2, one)
        a3, b3, c3, d3 = _quarter_round(a3, b3, c3, d3, one)
        a0, b1, c2, d3 = _quarter_round(a0, b1, c2, d3, one)
        a1, b2, c3, d0 = _quarter_round(a1, b2, c3, d0, one)
        a2, b3, c0, d1 = _quarter_round(a2, b3, c0, d1, one)
        a3, b0, c1, d2 = _quarter_round(a3, b0, c1, d2, one)
    return (
        a0 + 0x61707865, a1 + 0x3320646E, a2 + 0x79622D32, a3 + 0x6B206574,
        b0 + k0, b1 + k1, b2 + k2, b3 + k3, c0 + k4, c1 + k5, c2 + k6, c3 + k7,
        d0 + n0, d1 + n1, d2 + n2, d3 + n3,
    )  # fmt: skip
