"""Numbers of which all ranks need the least before a step's sums are formed.

They are asked for when the backward pass begins, and heard after it. On a GPU the host waits at
neither: question and answer have a stream of their own, and the answer is there long before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.core.platform.host_copies import side_stream, to_host


class Asked:
    """A question to all ranks.

    Args:
        numbers: This rank's.
        groups: Groups of ranks that ask one after the other, so that all of them hear the same;
            on each rank in the same order.
        device: Of the collectives.
    """

    def __init__(
        self, numbers: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> None:
        self._arrived: Any = None
        self._least: Tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if not groups:
            return
        with _aside(device):
            if device.type == "cuda":
                self._least = self._least.pin_memory().to(device, non_blocking=True)
            for group in groups:
                dist.all_reduce(self._least, dist.ReduceOp.MIN, group=group)
            self._least, self._arrived = to_host(self._least)

    def least(self) -> list[int]:
        """The least of each number."""
        if self._arrived is not None:
            self._arrived.synchronize()
        least: list[int] = self._least.tolist()
        return least


def _aside(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(side_stream(device, "numbers"))
