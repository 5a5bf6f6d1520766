"""Numbers that ranks compare while they go on computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from opacus.core.platform.host_copies import beside, to_host


class Least:
    """The least of the ranks' numbers. The host waits for it when it is read.

    On a GPU the numbers go beside what is computed: they are there when all ranks have come to the
    place where they were sent, not when the device has done what it was given since.

    Args:
        numbers: This rank's.
        groups: Those that compare, one after another, each with the device of its tensors; the
            same on all ranks.
    """

    def __init__(self, numbers: Sequence[int], groups: Mapping[Any, torch.device]) -> None:
        device = next(iter(groups.values()))
        with beside(device):
            own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            if device.type == "cuda":
                own = own.pin_memory().to(device, non_blocking=True)
            for group in groups:
                if dist.get_world_size(group) > 1:
                    dist.all_reduce(own, dist.ReduceOp.MIN, group=group)
            self._host, self._arrived = to_host(own)

    def read(self) -> list[int]:
        """The least of each number."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()  # type: ignore[no-any-return]
