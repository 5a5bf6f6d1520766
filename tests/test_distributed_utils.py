"""What tests of several processes make of ranks that end in their own ways."""

from __future__ import annotations

import atexit
import os

import pytest

from tests.distributed_utils import DistributedTestError, run_distributed


def aborts(rank: int, world_size: int, when: str) -> int:
    if when == "while it ends" and rank == 1:
        atexit.register(os.abort)
    if when == "before its work is done" and rank == 1:
        os.abort()
    return rank


def test_a_rank_that_aborts_while_it_ends_has_done_its_work() -> None:
    assert run_distributed(aborts, 2, "while it ends") == [0, 1]


def test_a_rank_that_aborts_before_is_a_failure() -> None:
    with pytest.raises(DistributedTestError, match="rank 1 died with exit code -6"):
        run_distributed(aborts, 2, "before its work is done", timeout=20)
