"""Environment variables that switch something on or off."""

from __future__ import annotations

import os


def switched_on(name: str, default: bool = False) -> bool:
    """Whether the environment variable ``name`` is 1.

    Raises:
        ValueError: It is neither ``0`` nor ``1``.
    """
    value = os.environ.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"
