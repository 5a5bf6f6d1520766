"""Records and stored gradients that wait in host memory for the clipped sum.

On a GPU they are copied to pinned memory on a stream of their own, while the backward pass goes
on; for the sum they are copied back the same way, a parameter's ahead of its use. On a CPU a copy
is made each way, so that the same code is tested there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from opacus.core.platform.host_copies import from_host, to_host
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
        self._host, _ = to_host(tensor)

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self._host.numel() * self._host.itemsize

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._back is None:
            self._back, self._event = from_host(self._host, self._device)

    def back(self) -> Tensor:
        """The tensor, on its device again."""
        self.fetch()
        assert self._back is not None
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        return self._back


def send(record: Record) -> None:
    """Let a record's tensors wait in host memory; until :func:`bring_back` it has none."""
    record.put_tensors(*tree_map_only(Tensor, Away, (record.activations, record.backprops)))


def fetch(record: Record) -> None:
    """Begin to copy the tensors of a record back that is away."""
    tree_map_only(Away, Away.fetch, (record.activations, record.backprops))


def bring_back(record: Record) -> None:
    """A record that was away has its tensors again."""
    record.put_tensors(*tree_map_only(Away, Away.back, (record.activations, record.backprops)))
    record.keep()
