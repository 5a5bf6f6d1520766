"""A step that is no larger than one that had room is not looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opacus.core.sums.room import Room, Size

SIZE = Size(units=4, given=1000, blocks=3, rounded=False)


@pytest.fixture
def room() -> Room:
    known = Room()
    known.note(SIZE, growth=50, held=200)
    return known


def test_without_a_limit_there_is_room() -> None:
    assert Room().has(SIZE, None, None)
    assert not Room().has(SIZE, 10**12, None) and not Room().has(SIZE, None, 10**12)


@pytest.mark.parametrize(
    ("change", "most", "free", "has"),
    [
        ({}, 200, 50, True),
        ({}, 199, 50, False),
        ({}, 200, 49, False),
        ({}, None, 50, True),
        ({"units": 3, "given": 900}, 200, 50, True),
        ({"units": 5}, 10**9, 10**9, False),
        ({"given": 1001}, 10**9, 10**9, False),
        ({"blocks": 2}, 10**9, 10**9, False),
        ({"rounded": True}, 10**9, 10**9, False),
    ],
)
def test_only_what_is_no_larger_fits(
    room: Room, change: dict[str, int], most: int | None, free: int | None, has: bool
) -> None:
    assert room.has(replace(SIZE, **change), most, free) is has


def test_the_largest_step_is_remembered(room: Room) -> None:
    room.note(replace(SIZE, units=2), growth=60, held=100)  # smaller, but needed more beside it
    assert (room.growth, room.held) == (60, 200) and room.has(SIZE, 200, 60)
    assert not room.has(SIZE, 200, 59)
    room.note(replace(SIZE, units=8, given=10), growth=5, held=5)  # neither: only it is known
    assert not room.has(SIZE, 10**9, 10**9)


def test_after_memory_ran_out_nothing_is_known(room: Room) -> None:
    room.forget()
    assert not room.has(SIZE, 10**9, 10**9)
