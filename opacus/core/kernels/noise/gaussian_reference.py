"""The definition of :mod:`opacus.core.kernels.noise.gaussian`, for the CPU, a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opacus.core.kernels.noise.words import key_words, lanes, random_words
from opacus.core.kernels.norms.reference import wide_dtype

if TYPE_CHECKING:
    from opacus.core.kernels.noise.draw import Draw
    from opacus.core.kernels.noise.regions import Region

# Elements of noise made at once, few enough that intermediate results stay in the CPU's cache.
PIECE = 1 << 16


def add(
    std: float,
    draws: Sequence[Draw],
    step: int,
    grid: float,
    past: Sequence[tuple[float, int]] = (),
    secure: bool = False,
    divisor: float = 1.0,
) -> None:
    """See :func:`opacus.core.kernels.noise.gaussian.add_gaussian`.

    Args:
        grid: Results are rounded to multiples of it; 0: no rounding.
    """
    for wide in (torch.float32, torch.float64):
        own = [d for d in draws if wide_dtype(d.source, d.target) == wide]
        for piece in _pieces(own):
            _add_piece(std, piece, step, grid, wide, past, secure, divisor)


def normals(blocks: Tensor, keys: Tensor, step: int, secure: bool, dtype: torch.dtype) -> Tensor:
    """``[N, lanes]`` standard normal numbers: all that the counters of the blocks make.

    Args:
        blocks: ``[N]``: numbers of elements, divided by ``lanes_of``.
        keys: ``[N, 8]``, or ``[1, 8]`` for all of them.
        step: See :func:`opacus.core.kernels.noise.gaussian.add_gaussian`.
        secure: ChaCha20 instead of Philox.
        dtype: fp32, or fp64 from twice as many words.
    """
    made = random_words(blocks, keys, step, secure)
    return _box_muller_double(made) if dtype == torch.float64 else _box_muller(made)


def lanes_of(secure: bool, dtype: torch.dtype) -> int:
    """Number of normal numbers that one counter makes."""
    return lanes(secure) // (2 if dtype == torch.float64 else 1)


def _box_muller(words: Tensor) -> Tensor:
    """``[N, lanes]`` in fp32; two words make two numbers, the largest of which is 6.8."""
    # In (0, 1]: the logarithm stays finite.
    uniform = words[:, ::2].to(torch.float32).add_(0.5).mul_(2.0**-32)
    # Signed, so that the angle is precise around zero: -pi to pi.
    signed = words[:, 1::2].to(torch.int32).to(torch.float32)
    return _turned(uniform, signed.mul_(math.pi * 2.0**-31))


def _box_muller_double(words: Tensor) -> Tensor:
    """``[N, lanes]`` in fp64; four words make two numbers."""
    top = (words[:, 1::4] << 21) | (words[:, ::4] >> 11)  # 53 bits
    signed = (words[:, 3::4] << 32) | words[:, 2::4]
    uniform = top.to(torch.float64).add_(0.5).mul_(2.0**-53)
    return _turned(uniform, signed.to(torch.float64).mul_(math.pi * 2.0**-63))


def _turned(uniform: Tensor, angle: Tensor) -> Tensor:
    """``[N, 2 k]`` from ``[N, k]`` each: cosine and sine of each pair next to each other."""
    radius = uniform.log_().mul_(-2).sqrt_()
    both = torch.stack([angle.cos().mul_(radius), angle.sin().mul_(radius)], dim=-1)
    return both.view(len(both), -1)


# --- tensors ---

# A draw, and the part of its elements that a piece has.
_Part = tuple["Draw", int, int]


def _pieces(draws: Sequence[Draw]) -> Iterator[list[_Part]]:
    """Parts of the tensors, together about ``PIECE`` elements, many small tensors or one part."""
    piece: list[_Part] = []
    held = 0
    for draw in draws:
        size, start = draw.source.numel(), 0
        while start < size:
            end = min(size, start + PIECE - held)
            piece.append((draw, start, end))
            held += end - start
            start = end
            if held == PIECE:
                yield piece
                piece, held = [], 0
    if piece:
        yield piece


def _add_piece(
    std: float,
    parts: list[_Part],
    step: int,
    grid: float,
    wide: torch.dtype,
    past: Sequence[tuple[float, int]],
    secure: bool,
    divisor: float,
) -> None:
    many = lanes_of(secure, wide)
    wanted = [_blocks(draw.region, start, end, many) for draw, start, end in parts]
    counts = [len(blocks) for blocks, _ in wanted]
    blocks = torch.cat([blocks for blocks, _ in wanted])

    def made(number: int, keys: Sequence[bytes]) -> Tensor:
        words = key_words(*keys)
        if len(parts) > 1:
            words = words.repeat_interleave(torch.tensor(counts, device="cpu"), dim=0)
        return normals(blocks, words, number, secure, wide)

    noise = made(step, [draw.key for draw, _, _ in parts])
    for place, (weight, number) in enumerate(past):
        noise.add_(made(number, [draw.earlier[place] for draw, _, _ in parts]), alpha=weight)
    noise.mul_(std)
    of_parts = noise.split(counts)
    for (draw, start, end), own, (_, chosen) in zip(parts, of_parts, wanted, strict=True):
        total = own.reshape(-1)[chosen].to(draw.source.device)
        total = total + draw.source.view(-1)[start:end]
        draw.target.view(-1)[start:end] = rounded(total, grid).div_(divisor)


def _blocks(region: Region, start: int, end: int, many: int) -> tuple[Tensor, Any]:
    """Blocks that the elements ``start`` to ``end - 1`` need, and where they are among all."""
    if region.width == region.size:
        first, last = region.first + start, region.first + end - 1
        blocks = torch.arange(first // many, last // many + 1, device="cpu")
        return blocks, slice(first % many, first % many + end - start)
    numbers = region.numbers(start, end)
    blocks, places = torch.unique_consecutive(numbers // many, return_inverse=True)
    return blocks, places * many + numbers % many


def rounded(total: Tensor, grid: float) -> Tensor:
    """The nearest multiples of ``grid``, a power of two; the tensor itself if that is 0."""
    return (total / grid).add_(0.5).floor_().mul_(grid) if grid else total
