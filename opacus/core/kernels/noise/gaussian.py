"""Gaussian noise added to many tensors in one pass over them.

Each number is a function of a key, a step and the number of its element: see
:mod:`opacus.core.privacy.key`. Random words come from a counter-based generator (Philox, or
ChaCha20 in secure mode), normal numbers from those by Box and Muller. On a GPU the noise is made
where it is added, so it takes no memory; ``gaussian_reference`` makes the same on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from opacus.core.kernels.noise import gaussian_reference
from opacus.core.kernels.noise.draw import Draw
from opacus.core.kernels.norms.choice import is_usable
from opacus.core.kernels.sums.weighted_sum import triton_works

# In secure mode, unless another one is given, results are multiples of this part of the standard
# deviation's power of two.
GRID = 2.0**-16


def add_gaussian(
    std: float,
    draws: Sequence[Draw],
    step: int,
    secure: bool = False,
    past: Sequence[tuple[float, int]] = (),
    part: float | None = None,
    divisor: float = 1.0,
) -> None:
    """Write ``(source + N(0, std^2)) / divisor`` to each target, all in fp32, or fp64 for fp64.

    Args:
        std: Standard deviation, positive.
        draws: Tensors of any devices and dtypes.
        step: Number in [0, 2^63) that has not been used with these keys for other sums.
        secure: Words from ChaCha20 instead of Philox, and sums rounded to a grid.
        part: Round sums to a grid of this part of the noise, so that the lowest bits of a float do
            not tell what was added to what; see :func:`grid_of`.
        past: Weights and numbers of earlier steps whose noise is made again and added, too, with
            the keys that each draw names for them.
        divisor: Of the sum with its noise, once that is on the grid.
    """
    if part is None and secure:
        part = GRID
    grid = grid_of(std, part) if part else 0.0
    on_gpu: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Draw]] = {}
    others: list[Draw] = []
    for draw in draws:
        source, target = draw.source, draw.target
        if source.is_cuda and is_usable(source) and is_usable(target) and triton_works():
            on_gpu.setdefault((source.device, source.dtype, target.dtype), []).append(draw)
        else:
            others.append(draw)
    for group in on_gpu.values():
        from opacus.core.kernels.noise import gaussian_triton

        gaussian_triton.launch(std, group, step, grid, past, secure, divisor)
    if others:
        gaussian_reference.add(std, others, step, grid, past, secure, divisor)


def grid_of(std: float, part: float = GRID) -> float:
    """Distance of the numbers that are released, a power of two if ``part`` is one.

    It depends on no data.
    """
    return part * 2.0 ** math.floor(math.log2(std))
