"""How much a step may hold: what the user says, else what is left of the card.

Note [One number for all ranks]
    Ranks that share blocks decide from the least of their numbers. A rank hears those of the
    others after a backward pass, so they count from the next step on; its own counts at once. Until
    then ranks may want different blocks to run again, which is exact too: all of them gather a
    block that any of them runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from opacus.core.platform.memory import Card, free_memory, in_use
from opacus.core.platform.sizes import DEFERRED_SHARE, FREE_MEMORY_SHARE

logger = logging.getLogger(__name__)

# Stands for "no limit" where ranks compare numbers.
_NONE = 1 << 62


class Limits:
    """The limits of the coming step.

    Attributes:
        held: Bytes that may be held for the sum, as the user says.
        peak: Bytes of a GPU that may be in use, as the user says.
        waiting: Bytes that records may have whose norms are deferred, as the user says.
        default_peak: Whether the card is the limit where the user says nothing.
        again: Blocks that run again in any case, as memory has run out so often; while fewer do,
            others wait in host memory if that is faster.
        spare: Bytes that are not held for the same reason.
    """

    def __init__(self) -> None:
        self.held: int | None = None
        self.peak: int | None = None
        self.waiting: int | None = None
        self.default_peak = False
        self.again = self.spare = 0
        self._others: tuple[int, int] = (_NONE, _NONE)
        self._card = Card()

    def go_on_from(self, other: Limits) -> None:
        """Have the limits of another one."""
        self.held, self.peak, self.waiting = other.held, other.peak, other.waiting
        self.again, self.spare = other.again, other.spare

    def asked(self) -> None:
        """The user has set a limit: what was learnt from running out of memory is past."""
        self.again = self.spare = 0

    @property
    def limited(self) -> bool:
        """Whether there is a limit other than the card."""
        return not (self.held is self.peak is None)

    def of_waiting(self, device: torch.device) -> int | None:
        """Bytes that deferred records may have, at the start of a backward pass; ``None``: any."""
        return default_budget(device) if self.waiting is None else self.waiting

    def now(self, device: torch.device) -> tuple[int | None, int | None]:
        """Bytes that may be held, and bytes of the device that may be in use; ``None``: any."""
        own, card = self.numbers
        held, peak = min(own, self._others[0]), min(card, self._others[1])
        if device.type == "cuda":
            if self.default_peak or peak != _NONE:  # no more than there is, whatever is allowed
                peak = min(peak, self._card.most_in_use(device))
            elif held == _NONE:
                held = int(free_memory(device) * FREE_MEMORY_SHARE)
        return _number(held), _number(peak)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What this process allows, to be compared with what the others do."""
        return tuple(_NONE if n is None else n for n in (self.held, self.peak))

    def agreed(self, least: Sequence[int]) -> None:
        """The least :attr:`numbers` of all ranks."""
        self._others = (least[0], least[1])

    def ran_out(self, held: int, block: int) -> None:
        """Memory has run out: hold a block less from the next step on, with a warning.

        Args:
            held: Bytes that were held.
            block: Bytes of them that the largest block had; 0 if no block can run again.
        """
        if not held:
            return  # what takes the memory is not ours
        self.again += bool(block)
        self.spare += block or held // 4
        logger.warning(
            "Out of memory with %.2f GiB held for the clipped sum; nothing of this batch is "
            "released. From the next step on %s. Set memory_budget to choose it yourself; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves less memory in pieces",
            held / 2**30,
            "a block more runs again, or all wait in host memory where that is faster"
            if block
            else f"{self.spare / 2**30:.2f} GiB less are held",
        )


def default_budget(device: torch.device) -> int | None:
    """Memory for records that wait: a share of what tensors have of a CUDA device now.

    At the start of a backward pass that is about its peak. Elsewhere there is no limit.
    """
    return int(in_use(device) * DEFERRED_SHARE) if device.type == "cuda" else None


def _number(limit: int) -> int | None:
    return None if limit == _NONE else limit
