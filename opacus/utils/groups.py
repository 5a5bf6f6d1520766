"""Groups of the data, of which batches are drawn in turn (correlated noise)."""

from __future__ import annotations

import torch
from torch import Tensor

from opacus.core.kernels.noise.words import words_between
from opacus.core.privacy.key import SAMPLING, RunKey


class Groups:
    """Items dealt out to groups, each by a draw of its own that is the same in all passes.

    Args:
        count: number of groups.
        generator: seeded source of the draws; by default the operating system.
        shared: all ranks of the default process group have rank 0's; a collective call.

    Attributes:
        key: what they are drawn with. It is no secret, unlike the coins that batches are drawn by.
        latest: number of the group that the latest step was of; -1 before the first.
    """

    latest = -1

    def __init__(
        self, count: int, generator: torch.Generator | None = None, shared: bool = False
    ) -> None:
        self._count, self.key = count, RunKey(generator, shared=shared)
        self.key.agree()
        self._of: tuple[bytes, Tensor] | None = None

    def __len__(self) -> int:
        return self._count

    def of(self, size: int) -> Tensor:
        """The group of each of so many items, int, shape `[size]`."""
        key = self.key.stream(SAMPLING, "parts")
        if self._of is None or self._of[0] != key:
            words = words_between(0, size, key, 0, self.key.secure)
            self._of = key, words.remainder(self._count).int()
        return self._of[1]
