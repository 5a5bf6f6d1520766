"""Sharded checkpoints of a private run; see :mod:`opacus.checkpoints.sharded`."""

from __future__ import annotations

from opacus.checkpoints.folder import latest_checkpoint
from opacus.checkpoints.sharded import Checkpointer, Progress, read_extra

__all__ = ["Checkpointer", "Progress", "latest_checkpoint", "read_extra"]
