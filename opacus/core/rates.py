"""How fast a device multiplies and moves memory, measured once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Rates:
    """Speeds of a device.

    Attributes:
        multiply_adds: Multiply-adds a second of a large matrix product.
        bytes: Bytes a second that are read or written.
    """

    multiply_adds: float
    bytes: float


@dataclass(frozen=True)
class Link:
    """What joins the ranks that hold the shards of a parameter.

    Attributes:
        world: Number of these ranks W.
        bytes: Bytes a second that each of them sends in an all-to-all.
    """

    world: int
    bytes: float

    def seconds(self, size: float) -> float:
        """Time to send each other rank its W-th of ``size`` bytes."""
        return size * (self.world - 1) / self.world / self.bytes


# A CPU core, roughly. Only ratios matter, and only to choose between exact methods.
CPU = Rates(multiply_adds=3e10, bytes=1e10)
CPU_LINK = 1e9


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
def link_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes a second of :class:`Link`, measured once on GPUs; a constant for CPUs.

    The ranks of the group call this together.
    """
    if device.type != "cuda":
        return CPU_LINK
    world = dist.get_world_size(group)
    sent = torch.empty((1 << 26) // world * world, dtype=torch.int8, device=device)
    received = torch.empty_like(sent)
    seconds = _seconds(lambda: dist.all_to_all_single(received, sent, group=group))
    return sent.numel() * (world - 1) / world / seconds


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
