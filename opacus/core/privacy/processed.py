"""Marks on gradients that a step has used: they must not enter another one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def mark_processed(*tensors: Tensor) -> None:
    """Mark tensors as used; the mark of one ends when it is modified in place."""
    for tensor in tensors:
        tensor._processed = True  # type: ignore[attr-defined]
        tensor._processed_version = tensor._version  # type: ignore[attr-defined]


def is_processed(tensor: Tensor) -> bool:
    """Whether ``tensor`` was used in a step and has not been modified since."""
    return getattr(tensor, "_processed_version", None) == tensor._version


def unprocessed(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The tensors, with ``None`` in place of those that :func:`is_processed`."""
    return [None if tensor is None or is_processed(tensor) else tensor for tensor in tensors]


def was_processed(tensor: Tensor) -> bool:
    """Whether ``tensor`` was used in a step, whatever has been done to it since."""
    return getattr(tensor, "_processed", False)
