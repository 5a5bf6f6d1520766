"""Ranks that meet in the store leave nothing there."""

from __future__ import annotations

import torch.distributed as dist

from opacus.core.platform.torch_internals import default_store
from opacus.core.ranks.meeting import Meetings
from tests.helpers.distributed import run_distributed


def keys_after(rank: int, world_size: int) -> list[int]:
    """Numbers of keys after meetings in which ranks differ, each time before one that agrees."""
    meetings = Meetings(range(world_size), "test")
    found = []
    for number in range(4):
        for again in range(number):
            said = meetings.meet(f"{number}/{again}", str(rank), 30.0).said
            assert said[rank] == str(rank)
        assert meetings.meet(f"{number}", "same", 30.0).agreed
        dist.barrier()
        found.append(default_store().num_keys())
        dist.barrier()
    return found


def test_keys_of_meetings_do_not_pile_up() -> None:
    for found in run_distributed(keys_after, 2, timeout=60):
        assert len(set(found)) == 1
