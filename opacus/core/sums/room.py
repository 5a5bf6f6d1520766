"""What a step needed for which no memory ran short.

A step like it, or a smaller one, then has room as well: nothing of it need be weighed layer by
layer, and ranks need not agree on what runs again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """How large a step is, at the start of its backward pass.

    Attributes:
        units: Losses.
        given: Bytes of what its blocks were given.
        blocks: Those of the model that can run again.
        rounded: Whether stored gradients take a byte an element.
    """

    units: int
    given: int
    blocks: int
    rounded: bool

    def within(self, other: Size) -> bool:
        """Whether a step of this size needs no more than one of the other."""
        smaller = self.units <= other.units and self.given <= other.given
        return smaller and (self.blocks, self.rounded) == (other.blocks, other.rounded)


class Room:
    """Remembers the largest such step."""

    def __init__(self) -> None:
        self._known: Size | None = None
        self.growth = 0  # from the start of its backward pass to its peak, bytes
        self.held = 0  # in that step

    def note(self, size: Size, growth: int, held: int) -> None:
        """A step was looked at, and nothing of it had to run again or to leave the device."""
        if self._known is not None and size.within(self._known):
            growth, held = max(growth, self.growth), max(held, self.held)
            size = self._known
        self._known, self.growth, self.held = size, max(0, growth), held

    def forget(self) -> None:
        """The next step is looked at."""
        self._known = None

    def has(self, size: Size, most: int | None, free: int | None) -> bool:
        """Whether a step is known to fit.

        Args:
            size: Its size.
            most: Bytes that may be held; ``None``: any.
            free: Bytes of the device that it may still take; ``None``: any.
        """
        if most is None and free is None:
            return True
        if self._known is None or not size.within(self._known):
            return False
        return (most is None or self.held <= most) and (free is None or self.growth <= free)
