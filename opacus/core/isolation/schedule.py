"""When batches are checked: how many steps ago the latest check was, and what of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Schedule:
    """When a check is due; see the note in :mod:`opacus.core.isolation.check`."""

    interval: int = 1000
    steps: int = 0
    checks: int = 0
    free: int = 0  # of these, checks whose time does not count
    latest: int = 0  # the step of the latest check
    known: set[Hashable] = field(default_factory=set)

    def due(self, key: Hashable) -> bool:
        """Whether a batch of this structure is checked in this step."""
        return self.periodic() or self.new(key)

    def periodic(self) -> bool:
        return self.checks == 0 or self.steps - self.latest >= self.interval

    def new(self, key: Hashable) -> bool:
        """Whether the structure is new, and checks have not taken too much time so far."""
        return key not in self.known and self.checks - self.free < 16 + self.steps // 500

    def doubt(self) -> None:
        """A batch was refused: the next ones are checked, too, until one is not.

        However many are refused, as many checks are left for others.
        """
        self.latest = -self.interval
        self.free += 1

    def again(self, key: Hashable) -> None:
        """A check had nothing that could be compared: the next batch is checked instead."""
        self.latest = -self.interval
        self.known.discard(key)

    def note(self, key: Hashable) -> None:
        self.known.add(key)
        self.checks += 1
        self.latest = self.steps
