"""Backward passes that began and did not end: an error in one leaves a part of its gradients."""

from __future__ import annotations

from typing import Any

from opacus.core.platform.torch_internals import number_of_backward


class Unfinished:
    """Notices, where ``backward()`` is torch's own, that one has failed.

    Attributes:
        running: Whether one has not ended.
        dropped: Whether one has failed, and what it left is gone.
        why: What an error of ours said in the latest one.
    """

    def __init__(self) -> None:
        self.running = self.dropped = self._told = False
        self.why = ""

    def fail(self, error: Exception) -> None:
        """One ends with this error, and has left nothing behind."""
        self.running = True
        self.why = f"{type(error).__name__}: {error}"

    @property
    def failed(self) -> bool:
        """Whether one did not end, as none runs now."""
        return self.running and number_of_backward() < 0

    def drop(self) -> None:
        """What it has left behind is gone; see :meth:`take`."""
        self.running, self.dropped, self._told = False, not self._told, False

    def tell(self) -> None:
        """Other ranks have heard of it, but what it has left is still there."""
        self.dropped, self._told = False, self.running

    def forget(self) -> None:
        """Other ranks have heard of it."""
        self.running = self.dropped = self._told = False
        self.why = ""

    def take(self) -> str:
        """Why a pass failed that was dropped since the latest call; empty if none was."""
        dropped, self.dropped = self.dropped, False
        why, self.why = self.why, ""
        return (why or "its backward pass failed") if dropped else ""

    def __getstate__(self) -> dict[str, Any]:
        return {"running": False, "dropped": False, "_told": False, "why": ""}
