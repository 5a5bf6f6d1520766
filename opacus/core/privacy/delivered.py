"""What tells the batches of a loader apart."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor

from opacus.core.platform.trees import tensors_of

MOST_REMEMBERED = 16_384  # tensors
NUMBERS = 32  # that are looked at of a tensor
FEWEST = 8  # different ones that a tensor is known by


class Delivered:
    """What tells the batches of a loader apart: a few numbers of each tensor."""

    def __init__(self) -> None:
        self._new: deque[Tensor] = deque(maxlen=MOST_REMEMBERED)  # numbers, on their device
        self._sizes: deque[int] = deque(maxlen=MOST_REMEMBERED)
        self._known: Counter[bytes] = Counter()

    def add(self, batch: Any) -> None:
        """A batch goes to the training loop; waits for no device."""
        for tensor in tensors_of(batch):
            numbers = _numbers(tensor)
            if numbers is not None:
                self._new.append(numbers)
                self._sizes.append(tensor.numel())

    def hold(self, inputs: Any) -> bool:
        """Whether all the inputs that can be told apart are from batches that were delivered."""
        self._read()
        own = [(_numbers(t), t.numel()) for t in tensors_of(inputs)]
        marks = [_mark(numbers, size) for numbers, size in own if numbers is not None]
        known = [self._known[mark] for mark in marks if mark is not None]
        # Numbers that are the same in each batch, such as positions, tell nothing.
        return all(known) and 1 in known

    def _read(self) -> None:
        while self._new:
            mark = _mark(self._new.popleft(), self._sizes.popleft())
            if mark is not None:
                self._known[mark] += 1
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]


def _numbers(tensor: Tensor) -> Tensor | None:
    """A few numbers of a tensor, from all over it."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    if not plain or tensor.numel() < FEWEST or tensor.dtype == torch.bool or tensor.is_complex():
        return None
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // NUMBERS)
    return flat[::step][:NUMBERS].clone()


def _mark(numbers: Tensor, size: int) -> bytes | None:
    """The numbers as bytes, the same in each dtype that a loop may cast to."""
    if numbers.is_floating_point():
        numbers = numbers.to("cpu", torch.bfloat16).view(torch.int16)
    numbers = numbers.to("cpu", torch.int64)
    if numbers.unique().numel() < FEWEST:
        return None
    return size.to_bytes(8, "little") + numbers.numpy().tobytes()
