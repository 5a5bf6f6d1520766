"""Records and stored gradients that wait in host memory for the clipped sum.

On a GPU they are copied to pinned memory on a stream of their own, while the backward pass goes
on; for the sum they are copied back the same way, a parameter's ahead of its use. On a CPU a copy
is made each way, so that the same code is tested there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from opacus.core.record.record import Record


class Away:
    """A tensor that has been copied to host memory.

    Args:
        tensor: On a GPU it is copied later, but before its memory is used again.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._back: Tensor | None = None
        self._event: Any = None
        on_gpu = tensor.is_cuda
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu)
        if not on_gpu:
            self._host.copy_(tensor)
            return
        side = _side(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self._host.numel() * self._host.itemsize

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._back is not None:
            return
        if self._device.type != "cuda":
            self._back = self._host.clone()
            return
        side = _side(self._device)
        self._back = torch.empty_like(self._host, device=self._device, pin_memory=False)
        side.wait_stream(torch.cuda.current_stream(self._device))  # whose memory it was
        with torch.cuda.stream(side):
            self._back.copy_(self._host, non_blocking=True)
            self._event = side.record_event()
        self._back.record_stream(side)

    def back(self) -> Tensor:
        """The tensor, on its device again."""
        self.fetch()
        assert self._back is not None
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        return self._back


def send(record: Record) -> None:
    """Let a record's tensors wait in host memory."""
    record.put_tensors(*tree_map_only(Tensor, Away, (record.activations, record.backprops)))


def is_away(record: Record) -> bool:
    """Whether its tensors are there."""
    return not record.tensors


def fetch(record: Record) -> None:
    """Begin to copy the tensors of a record back that is away."""
    tree_map_only(Away, Away.fetch, (record.activations, record.backprops))


def bring_back(record: Record) -> None:
    """A record that was away has its tensors again."""
    record.put_tensors(*tree_map_only(Away, Away.back, (record.activations, record.backprops)))
    record.keep()


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
