"""Looks at the operations that run: how large their results are, whether they wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Dispatched(TorchDispatchMode):
    """Inside the ``with`` block, notes each operation and the largest result.

    Attributes:
        names: Names of the operations.
        largest: Bytes of the largest tensor that was made; views are not counted.
    """

    # Operations whose result, or its shape, the host has to wait for on a device.
    WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        given = {s.data_ptr() for s in _storages((args, kwargs))}
        made = [s.nbytes() for s in _storages(result) if s.data_ptr() not in given]
        self.largest = max([self.largest, *made])
        return result

    @property
    def waits(self) -> list[str]:
        """The operations that the host waits for."""
        return [n for n in self.names if any(wait in n for wait in self.WAITS)]


def _storages(tensors: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, Tensor)]


def largest_bytes(function: Any, *args: Any) -> int:
    """Bytes of the largest tensor that ``function(*args)`` makes."""
    with Dispatched() as seen, torch.no_grad():
        function(*args)
    return seen.largest
