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
    """

    multiply_adds: float
    bytes: float


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
    return Rates(multiply_adds=side**3 / product, bytes=2 * block.numel() / copy)


@functools.cache
def host_rate(device: torch.device) -> float:
    """Bytes a second from host memory; measured like :func:`rates_of`, where it is asked for."""
    if device.type != "cuda":
        return CPU.bytes
    there = torch.empty(1 << 26, dtype=torch.int8, device="cpu", pin_memory=True)
    here = torch.empty_like(there, device=device, pin_memory=False)
    return there.numel() / _seconds(lambda: here.copy_(there, non_blocking=True))


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
