"""Whether the ranks of a sharded model hold different samples or the same ones."""

from __future__ import annotations

LAYOUTS = ("auto", "sharded", "replicated")


def check_data_layout(data_layout: str) -> None:
    """Refuse an unknown layout.

    Raises:
        ValueError: It is none of :data:`LAYOUTS`.
    """
    if data_layout not in LAYOUTS:
        raise ValueError(f"data_layout must be one of {LAYOUTS}, got {data_layout!r}")
