"""Clipped sums of physical batches that wait, unreduced, for the last one of their logical batch.

Each rank adds up its own; ranks add theirs once, with the sums of the last physical batch. What
waits is whole on each rank: 4 bytes a parameter, where shards would be that over the ranks.

A batch's sum cannot be taken out again. So where a batch is dropped after its backward pass, or a
backward pass fails, all that waits is dropped with it: the logical batch has fewer samples then,
never one of them twice.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)


class Unreduced:
    """The sums that wait.

    Attributes:
        wanted: Whether the sums of the coming backward pass should wait, if there is room.
        fresh: Whether the latest ones have not been followed by ``optimizer.step()``.
        waiting: Whether any wait, on all ranks alike: this one's may all be nothing.
    """

    def __init__(self) -> None:
        self.wanted = self.fresh = self.waiting = False
        self._sums: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, name: str, part: Tensor) -> None:
        """One more term of a parameter's sum, ``[W, n]``: the parts of W ranks."""
        self.fresh = True
        known = self._sums.get(name)
        self._sums[name] = part if known is None else known.add_(part)

    def pop(self, name: str) -> Tensor | None:
        """What waits of a parameter, ``[W, n]``; it waits no more."""
        return self._sums.pop(name, None)

    def take(self) -> None:
        """``optimizer.step()`` has come by: the batches are in the logical one."""
        self.fresh = False

    def drop(self, warn: bool = False) -> None:
        """Forget all of it."""
        if self._sums and warn:
            logger.warning(
                "A physical batch was dropped after its backward pass. Its clipped sum is in that "
                "of the logical batch already, so all physical batches before it are dropped, "
                "too. Call optimizer.step() after each of them, or set optimizer.reduce_once=False"
            )
        self._sums.clear()
        self.wanted = self.fresh = self.waiting = False

    def __reduce__(self) -> Any:
        return Unreduced, ()
