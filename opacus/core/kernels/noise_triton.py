"""GPU kernel that draws Gaussian noise and adds it in the same pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # counters of a block; each gives four numbers
COLUMNS = 3


@triton.jit
def _normal_pair(first, second):
    """Box-Muller, on 32 random bits each: the tails reach to 6.7 standard deviations."""
    uniform = (first.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt(tl.maximum(-2.0 * tl.log(uniform), 0.0))
    angle = second.to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _add(target, places, size, value):
    inside = places < size
    known = tl.load(target + places, mask=inside, other=0.0)
    tl.store(target + places, known + value, mask=inside)


@triton.jit
def _kernel(
    table,
    seed,
    std,
    count,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, COUNT)
    starts = tl.load(table + lanes * COLUMNS, mask=lanes < count, other=1 << 62)
    entry = table + (tl.sum((starts <= block).to(tl.int64)) - 1) * COLUMNS
    target = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 2)
    counters = block * BLOCK + tl.arange(0, BLOCK)  # unique over the whole launch
    one, two, three, four = tl.randint4x(tl.load(seed), counters)
    first, second = _normal_pair(one.to(tl.uint32), two.to(tl.uint32))
    third, fourth = _normal_pair(three.to(tl.uint32), four.to(tl.uint32))
    places = (block - tl.load(entry)) * (4 * BLOCK) + tl.arange(0, BLOCK)
    _add(target, places, size, first * std)
    _add(target, places + BLOCK, size, second * std)
    _add(target, places + 2 * BLOCK, size, third * std)
    _add(target, places + 3 * BLOCK, size, fourth * std)


def add_noise(std: float, tensors: Sequence[Tensor], stream: torch.Generator) -> None:
    """Add Gaussian noise to contiguous fp32 tensors on one GPU.

    A seed of 62 bits is drawn from ``stream`` for each call; the numbers are Philox' with
    that key and a counter that no two elements share.

    Args:
        std: Standard deviation.
        tensors: Changed in place.
        stream: Generator on their device.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return
    device = tensors[0].device
    seed = torch.randint(2**62, (1,), generator=stream, device=device)
    rows, blocks = [], 0
    for tensor in tensors:
        rows.append((blocks, tensor.data_ptr(), tensor.numel()))
        blocks += triton.cdiv(tensor.numel(), 4 * BLOCK)
    _kernel[(blocks,)](
        torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
        seed,
        std,
        len(rows),
        COUNT=triton.next_power_of_2(len(rows)),
        BLOCK=BLOCK,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
