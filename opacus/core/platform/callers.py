"""Who has called a function: for what torch's own code does to an optimizer or a loss."""

from __future__ import annotations

import sys
from types import FrameType

# Wrappers (of hooks, schedulers, profilers, trainers) between a caller and what it calls.
MOST_FRAMES = 16


def callers() -> list[FrameType]:
    """The frames of the caller of who asks, of its caller, and so on: the nearest ones."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found
