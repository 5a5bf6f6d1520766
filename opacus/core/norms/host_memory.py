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


class HostMemory:
    """What has been sent there, by the parameter whose sum needs it."""

    def __init__(self) -> None:
        self.formed: dict[str, Away] = {}
        self.records: list[Record] = []
        self._by_owner: dict[str, list[Record]] = {}

    def send(self, record: Record) -> None:
        """The record's tensors."""
        sent = tree_map_only(Tensor, Away, (record.activations, record.backprops))
        record.put_tensors(*sent)
        self.records.append(record)
        for owner in {record.layer.owners[n] for n in record.spec.params}:
            self._by_owner.setdefault(owner, []).append(record)

    def fetch(self, owner: str) -> None:
        """Begin to copy back what a parameter's sum needs."""
        if owner in self.formed:
            self.formed[owner].fetch()
        for record in self._by_owner.get(owner, ()):
            tree_map_only(Away, Away.fetch, (record.activations, record.backprops))

    def take(self, owner: str) -> Tensor | None:
        """A parameter's stored gradients; its records have their tensors again."""
        formed = self.formed.pop(owner, None)
        for record in self._by_owner.pop(owner, ()):
            back = tree_map_only(Away, Away.back, (record.activations, record.backprops))
            record.put_tensors(*back)
            record.versions = [t._version for t in record.tensors]
        return None if formed is None else formed.back()

    def __bool__(self) -> bool:
        return bool(self.formed or self._by_owner)
