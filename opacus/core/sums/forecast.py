"""Whether a backward pass will leave no block to a replay, foretold from one that was like it.

Ranks that share blocks run them again together. To ask for that when a backward pass has been
started makes the host wait until the device has come to its end, and then the device for the
host. So each rank says beforehand whether none of its blocks will run again for certain; if all
say so, nothing is asked afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# Kinds of backward passes that are remembered.
MOST_KNOWN = 1_000


@dataclass(frozen=True)
class Standing:
    """How memory stands when a backward pass begins, in bytes.

    Attributes:
        used: In use.
        peak: Most that may be in use at any time; ``None``: any.
        held: Most that may be held for the sum; ``None``: any.
    """

    used: int
    peak: int | None
    held: int | None

    def lacks(self, before: Standing) -> int | None:
        """Bytes that there is less room for than before; ``None`` if that is not known."""
        less = max(0, self.used - before.used)
        for now, then in ((self.peak, before.peak), (self.held, before.held)):
            if now is None:
                continue
            if then is None:
                return None
            less += max(0, then - now)
        return less


class Forecast:
    """Remembers how much room backward passes had to spare.

    Attributes:
        certain: Whether no block of the running backward pass will run again, whatever comes.
    """

    def __init__(self) -> None:
        self.certain = False
        self._known: dict[Hashable, tuple[Standing, int]] = {}
        self._begun: tuple[Hashable, Standing] | None = None
        self._spare: int | None = None  # the least that was to spare at any block

    def start(self, kind: Hashable, standing: Standing) -> None:
        """A backward pass begins.

        Args:
            kind: Equal for those that run the same blocks on tensors of the same shapes.
            standing: Of the memory.
        """
        self._begun, self._spare = (kind, standing), None
        known = self._known.get(kind)
        lacks = None if known is None else standing.lacks(known[0])
        self.certain = known is not None and lacks is not None and lacks <= known[1]

    def clear(self) -> None:
        """One begins in which no block can run again."""
        self._begun, self._spare, self.certain = None, None, True

    def doubt(self) -> None:
        """One begins in which blocks run again in any case."""
        self._begun, self._spare, self.certain = None, None, False

    def saw(self, spare: int) -> None:
        """So many bytes more might have been held of a block; negative if it has no room."""
        self._spare = spare if self._spare is None else min(spare, self._spare)

    def finish(self) -> None:
        """It is over."""
        if self._begun is None or self._spare is None:
            return
        (kind, standing), self._begun = self._begun, None
        if self._spare < 0:
            self._known.pop(kind, None)
            return
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[kind] = standing, self._spare
