"""The definition of :mod:`opacus.core.kernels.noise.gaussian`, for the CPU, a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opacus.core.kernels.noise import chacha, philox

if TYPE_CHECKING:
    from opacus.core.kernels.noise.gaussian import Draw
    from opacus.core.kernels.noise.regions import Region

Words = NDArray[np.uint32]
Numbers = NDArray[np.uint64]

# Elements of noise that are made at once: what is needed on the way stays in the CPU's cache.
PIECE = 1 << 16


def add(std: float, draws: Sequence[Draw], step: int, grid: float) -> None:
    """See :func:`opacus.core.kernels.noise.gaussian.add_gaussian`; ``grid`` 0: not in secure mode."""
    for wide in (torch.float32, torch.float64):
        own = [d for d in draws if (_wide(d) == torch.float64) == (wide == torch.float64)]
        for piece in _pieces(own):
            _add_piece(std, piece, step, grid, wide)


def normals(blocks: Numbers, keys: Words, step: int, secure: bool, dtype: torch.dtype) -> Tensor:
    """``[N, lanes]`` standard normal numbers: all that the counters of the blocks make.

    Args:
        blocks: ``[N]``: numbers of elements, divided by ``lanes_of``.
        keys: ``[N, 8]``.
        step: See :func:`opacus.core.kernels.noise.gaussian.add_gaussian`.
        secure: ChaCha20 instead of Philox.
        dtype: fp32, or fp64 from twice as many words.
    """
    step_words = np.full(len(blocks), step, dtype=np.uint64)
    counter = [half for whole in (blocks, step_words) for half in _halves(whole)]
    if secure:
        words = chacha.chacha20(counter, list(keys.T))
    else:
        words = philox.philox(counter, [keys[:, 0], keys[:, 1]])
    made = np.stack(words, axis=1)
    return _box_muller_double(made) if dtype == torch.float64 else _box_muller(made)


def lanes_of(secure: bool, dtype: torch.dtype) -> int:
    """How many numbers one counter makes."""
    return (chacha.LANES if secure else philox.LANES) // (2 if dtype == torch.float64 else 1)


def _halves(numbers: Numbers) -> tuple[Words, Words]:
    return numbers.astype(np.uint32), (numbers >> np.uint64(32)).astype(np.uint32)


def _box_muller(words: Words) -> Tensor:
    """``[N, lanes]`` in fp32; two words make two numbers, the largest of which is 6.8."""
    # In (0, 1]: the logarithm stays finite.
    uniform = torch.from_numpy(words[:, ::2].astype(np.float32)).add_(0.5).mul_(2.0**-32)
    # Signed, so that the angle is precise around zero: -pi to pi.
    signed = words[:, 1::2].view(np.int32).astype(np.float32)
    return _turned(uniform, torch.from_numpy(signed).mul_(math.pi * 2.0**-31))


def _box_muller_double(words: Words) -> Tensor:
    """``[N, lanes]`` in fp64; four words make two numbers."""
    wide = words.astype(np.uint64)
    whole = (wide[:, 1::2] << np.uint64(32)) | wide[:, ::2]
    top = (whole[:, ::2] >> np.uint64(11)).astype(np.float64)
    signed = whole[:, 1::2].view(np.int64).astype(np.float64)
    uniform = torch.from_numpy(top).add_(0.5).mul_(2.0**-53)
    return _turned(uniform, torch.from_numpy(signed).mul_(math.pi * 2.0**-63))


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


def _add_piece(std: float, parts: list[_Part], step: int, grid: float, wide: torch.dtype) -> None:
    lanes = lanes_of(grid > 0, wide)
    wanted = [_blocks(draw.region, start, end, lanes) for draw, start, end in parts]
    counts = [len(blocks) for blocks, _ in wanted]
    keys = np.stack([np.frombuffer(draw.key, dtype="<u4") for draw, _, _ in parts])
    blocks = np.concatenate([blocks for blocks, _ in wanted])
    noise = normals(blocks, np.repeat(keys, counts, axis=0), step, grid > 0, wide).mul_(std)
    of_parts = noise.split(counts)
    for (draw, start, end), own, (_, chosen) in zip(parts, of_parts, wanted, strict=True):
        total = own.reshape(-1)[chosen].to(draw.source.device)
        total = total + draw.source.view(-1)[start:end]
        draw.target.view(-1)[start:end] = rounded(total, grid)


def _blocks(region: Region, start: int, end: int, lanes: int) -> tuple[Numbers, Any]:
    """Blocks that the elements ``start`` to ``end - 1`` need, and where they are among all."""
    if region.width == region.size:
        first, last = region.first + start, region.first + end - 1
        blocks = np.arange(first // lanes, last // lanes + 1, dtype=np.uint64)
        return blocks, slice(first % lanes, first % lanes + end - start)
    blocks, lane = np.divmod(region.numbers(start, end), np.uint64(lanes))
    new = np.ones(len(blocks), dtype=bool)
    new[1:] = blocks[1:] != blocks[:-1]
    places = (np.cumsum(new) - 1) * lanes + lane.astype(np.int64)
    return blocks[new], torch.from_numpy(places)


def rounded(total: Tensor, grid: float) -> Tensor:
    """The nearest multiples of ``grid``, a power of two; the tensor itself if that is 0."""
    return (total / grid).add_(0.5).floor_().mul_(grid) if grid else total


def _wide(draw: Draw) -> torch.dtype:
    """What noise and sum are made in."""
    double = torch.float64 in (draw.source.dtype, draw.target.dtype)
    return torch.float64 if double else torch.float32
