"""Marks on gradients that a step has used: they must not enter another one."""

from __future__ import annotations

from torch import Tensor


def mark_processed(tensor: Tensor) -> None:
    """Mark ``tensor`` as used; the mark ends when it is modified in place."""
    tensor._processed = True  # type: ignore[attr-defined]
    tensor._processed_version = tensor._version  # type: ignore[attr-defined]


def is_processed(tensor: Tensor) -> bool:
    """Whether ``tensor`` was used in a step and has not been modified since."""
    return getattr(tensor, "_processed_version", None) == tensor._version


def was_processed(tensor: Tensor) -> bool:
    """Whether ``tensor`` was used in a step, whatever has been done to it since."""
    return getattr(tensor, "_processed", False)
