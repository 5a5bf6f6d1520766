"""Copies to pinned host memory and back, on a stream of their own beside the computation.

On a CPU a copy is made each way at once, so that the same code is tested there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """Begin to copy a tensor to host memory.

    Args:
        tensor: On a GPU it is copied later, but before its memory is used again.

    Returns:
        The copy, and the event after which the host may read it; ``None``: now.
    """
    if not tensor.is_cuda:
        return tensor.clone(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    side = side_stream(tensor.device, "copies")
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
        event = side.record_event()
    tensor.record_stream(side)
    return host, event


def from_host(host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """Begin to copy a tensor back from host memory.

    Returns:
        The copy, and the event which its reader's stream has to wait for; ``None``: it is there.
    """
    if device.type != "cuda":
        return host.clone(), None
    side = side_stream(device, "copies")
    back = torch.empty_like(host, device=device, pin_memory=False)
    side.wait_stream(torch.cuda.current_stream(device))  # whose memory it was
    with torch.cuda.stream(side):
        back.copy_(host, non_blocking=True)
        event = side.record_event()
    back.record_stream(side)
    return back, event


def wait_for(device: torch.device) -> None:
    """The host waits for what has been asked of a device on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@functools.cache
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A stream beside the computation; another one for each purpose."""
    return torch.cuda.Stream(device)
