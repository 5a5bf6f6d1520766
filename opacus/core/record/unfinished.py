"""Backward passes that began and did not end: an error in one leaves a part of its gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

from opacus.core.platform.torch_internals import at_end_of_backward, number_of_backward


class Unfinished:
    """Notices, where ``backward()`` is torch's own, that one has failed.

    Attributes:
        why: What an error of ours said in the latest one.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._dropped = False
        self.why = ""

    def begin(self) -> None:
        """A layer's backward runs; nested passes, of checkpoints, have numbers of their own."""
        number = number_of_backward()
        if number not in self._running:
            self._running.add(number)
            at_end_of_backward(partial(self._running.discard, number))

    def fail(self, error: Exception) -> None:
        """One ends with this error, and has left nothing behind."""
        self._running.add(-1)
        self.why = f"{type(error).__name__}: {error}"

    @property
    def failed(self) -> bool:
        """Whether one did not end, as none runs now."""
        return bool(self._running) and number_of_backward() < 0

    def drop(self) -> None:
        """What it has left behind is gone; see :meth:`take`."""
        self._running.clear()
        self._dropped = True

    def forget(self) -> None:
        """Other ranks have heard of it."""
        self._running.clear()
        self._dropped, self.why = False, ""

    def take(self) -> str:
        """Why a pass failed that was dropped since the latest call; empty if none was."""
        dropped, self._dropped = self._dropped, False
        why, self.why = self.why, ""
        return (why or "its backward pass failed") if dropped else ""

    def __getstate__(self) -> dict[str, Any]:
        return {"_running": set(), "_dropped": False, "why": ""}
