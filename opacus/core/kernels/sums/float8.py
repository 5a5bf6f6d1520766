"""Per-sample gradients rounded to float8, one scale for each unit, by coins that favour no side.

What is stored is ``scales[i] * values[i]``, and ``norm_sq`` is of exactly that: whatever rounding
does, what is summed is what was measured. An element lies between two numbers of float8 (E4M3, 3
bits of mantissa); it becomes the upper one with the probability that keeps its expectation, to a
256th of their distance.

Note [Coins]
    A coin is a byte of Philox at (row, column): a function of key, number and place. Rows are cut
    into tiles of ``TILE`` columns. Counter ``tile * LANE + i`` of a row, after those of the rows
    before, makes 16 bytes; byte j (word j mod 4, and there number j div 4 from the lowest)
    belongs to column ``j * LANE + i`` of the tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opacus.core.kernels.host.operands import FLOAT8, LARGEST, SUPPORTED, converts_float8
from opacus.core.kernels.norms.reference import sum_of_squares, wide_dtype, widen
from opacus.core.kernels.sums.coins import TILE, coins
from opacus.core.kernels.sums.weighted_sum import triton_works

# Tiles that are handled at once where there is no kernel.
TILES = 64
# Exponent of the smallest normal number, and bits of the mantissa.
LEAST_EXPONENT, MANTISSA = -6, 3


@dataclass(frozen=True)
class Rounded:
    """Per-sample gradients in float8.

    Attributes:
        values: ``[B, *shape]``, finite; 0 for a unit whose gradient is not finite.
        scales: ``[B]``, what the values are multiplied by.
        norm_sq: ``[B]`` squared norms of the products; NaN for a unit that is not finite.
    """

    values: Tensor
    scales: Tensor
    norm_sq: Tensor


def rounded(grads: Tensor, key: bytes, number: int) -> Rounded:
    """Round ``grads`` ``[B, *shape]``.

    Args:
        grads: In fp16, bf16, fp32 or fp64.
        key: 32 bytes, of which Philox takes 8.
        number: With another one the coins differ.
    """
    flat = grads.reshape(len(grads), math.prod(grads.shape[1:]))
    if not flat.numel():
        empty = torch.zeros(len(grads), dtype=wide_dtype(grads), device=grads.device)
        return Rounded(grads.to(FLOAT8), torch.ones_like(empty), empty)
    largest = torch.linalg.vector_norm(flat, math.inf, dim=1, dtype=wide_dtype(flat))
    finite = largest.isfinite()
    scales = (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    scales = torch.where(finite, scales, 1.0)
    if _has_kernel(flat):
        from opacus.core.kernels.sums import float8_triton as gpu

        values, squares = gpu.launch(flat, scales, finite, key, number)
    else:
        values, squares = _round_on_cpu(flat, scales, finite, key, number)
    norm_sq = torch.where(finite, (scales * squares.sqrt()).square(), math.nan)
    return Rounded(values.view(grads.shape), scales, norm_sq)


def scaled_factors(factors: Tensor, scales: Tensor, excluded: Tensor | None) -> Tensor:
    """Factors ``[n]`` of values whose products with ``scales`` ``[n]`` have ``factors`` ``[B]``."""
    rows = len(scales)
    own = factors[:rows].to(device=scales.device, dtype=scales.dtype) * scales
    return own if excluded is None else own.masked_fill(excluded[:rows].to(own.device), 0.0)


def _round_on_cpu(
    flat: Tensor, scales: Tensor, finite: Tensor, key: bytes, number: int
) -> tuple[Tensor, Tensor]:
    """Values ``[B, n]`` and the sums of their squares ``[B]``; the definition of the kernel."""
    rows, size = flat.shape
    tiles = -(-size // TILE)
    padded = torch.nn.functional.pad(flat, (0, tiles * TILE - size)).view(rows * tiles, TILE)
    scale, whole = (x.repeat_interleave(tiles)[:, None] for x in (scales, finite))
    values = torch.empty(rows * tiles, TILE, dtype=FLOAT8, device=flat.device)
    squares = torch.empty(rows * tiles, dtype=scales.dtype, device=flat.device)
    for first in range(0, rows * tiles, TILES):
        part = slice(first, first + TILES)
        exact = torch.where(whole[part], widen(padded[part]) / scale[part], 0.0)
        tossed = coins(first, len(exact), key, number).to(exact.device, exact.dtype)
        near = _to_grid(exact, tossed)
        values[part], squares[part] = near.to(FLOAT8), sum_of_squares(near)
    found = values.view(rows, tiles * TILE)[:, :size].contiguous()
    return found, squares.view(rows, tiles).sum(1)


def _to_grid(exact: Tensor, tossed: Tensor) -> Tensor:
    """Numbers of float8 beside ``exact``."""
    exponents = torch.frexp(exact).exponent - 1
    steps = torch.ldexp(torch.ones_like(exact), exponents.clamp(min=LEAST_EXPONENT) - MANTISSA)
    return (torch.floor(exact / steps + tossed) * steps).clamp_(-LARGEST, LARGEST)


def _has_kernel(flat: Tensor) -> bool:
    known = flat.is_cuda and flat.is_contiguous() and flat.dtype in SUPPORTED
    return known and triton_works() and converts_float8(flat.get_device())
