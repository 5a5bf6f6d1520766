"""Who calls a function."""

from __future__ import annotations

from opacus.core.platform.callers import MOST_FRAMES, callers


def test_callers_are_those_of_who_asks() -> None:
    def asks() -> list[str]:
        return [frame.f_code.co_name for frame in callers()]

    def between(depth: int) -> list[str]:
        return asks() if depth == 0 else between(depth - 1)

    names = between(2)
    assert names[:4] == ["between"] * 3 + ["test_callers_are_those_of_who_asks"]
    assert between(MOST_FRAMES) == ["between"] * MOST_FRAMES
