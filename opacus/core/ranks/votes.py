"""Ranks take a step together: all of them go on, or all raise what one of them refuses.

Before anything of a step is released each rank says, through the store that joined them, whether it
goes on. A rank whose backward pass fails says so at once, as it will not come to the step, where
the others would wait for it. So each batch is one vote of every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from opacus.core.ranks.meeting import Meetings

_GO = "go: "


class Votes:
    """The votes of ranks that share a model; each rank takes part in all of them.

    Args:
        ranks: Those that vote.
    """

    # Seconds that ranks wait for one that is alive.
    WAIT: ClassVar[float] = 600.0

    def __init__(self, ranks: Iterable[int]) -> None:
        self._meetings = Meetings(ranks, "steps")
        self._held = 0
        self._refused = False  # this batch, so that nobody waits for its vote

    def begin(self) -> None:
        """Another batch begins."""
        self._refused = False

    def refuse(self, reason: str | BaseException) -> None:
        """This rank drops its batch; the others need not wait for it."""
        if isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {reason}"
        if not self._refused:
            self._refused = True
            self._meet(f"refused: {reason}", 0.0)

    def agree(self, how: str) -> dict[int, str]:
        """Go on with the batch.

        Args:
            how: What ranks have to agree on besides.

        Returns:
            The same of each rank.

        Raises:
            RuntimeError: On all ranks but those that have an error of their own: one refuses its
                batch, or has ended.
        """
        self._refused = False
        said = self._meet(_GO + how, self.WAIT)
        against = {rank: text for rank, text in said.items() if not (text or "").startswith(_GO)}
        if against:
            self._refused = True  # it has been dropped: there is nothing to add
            self._raise(against)
        return {rank: (text or "").removeprefix(_GO) for rank, text in said.items()}

    def _meet(self, own: str, wait: float) -> dict[int, str | None]:
        self._held += 1
        return self._meetings.meet(str(self._held), own, wait).said

    def _raise(self, against: dict[int, str | None]) -> None:
        """Those who say why are named first."""
        rank, text = min(against.items(), key=lambda item: (item[1] is None, item[0]))
        why = f"refused its batch: {(text or '').removeprefix('refused: ')}"
        if text is None:
            why = self._meetings.ended(rank) or "did not come to the step"
        raise RuntimeError(f"nothing of this step was released: rank {rank} {why}")
