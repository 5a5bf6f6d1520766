"""How fast a device multiplies and moves memory, measured once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    """Speeds of a device.

    Attributes:
        multiply_adds: Multiply-adds a second of a large matrix product.
        bytes: Bytes a second that are read or written.
        host: Bytes a second from host memory.
    """

    multiply_adds: float
    bytes: float
    host: float = 1e10


# A CPU core, roughly. Only ratios matter, and only to choose between exact methods.
CPU = Rates(multiply_adds=3e10, bytes=1e10)


@functools.cache
def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measured rates of a CUDA device for products of ``dtype``; a constant for the CPU.

    The first call for a device takes some milliseconds and waits for it.
    """
    if device.type != "cuda":
        return CPU
    side = 4096 if dtype in (torch.float16, torch.bfloat16) else 2048
    square = torch.randn(side, side, device=device).to(dtype)
    block = torch.empty(1 << 26, dtype=torch.int8, device=device)
    copied = torch.empty_like(block)
    product = _seconds(lambda: torch.mm(square, square))
    copy = _seconds(lambda: copied.copy_(block))
    there = torch.empty_like(block, device="cpu", pin_memory=True)
    back = _seconds(lambda: copied.copy_(there, non_blocking=True))
    size = block.numel()
    return Rates(multiply_adds=side**3 / product, bytes=2 * size / copy, host=size / back)


def _seconds(function: object, repeats: int = 5) -> float:
    """Shortest of a few timed calls, after one that is not timed."""
    assert callable(function)
    function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)
