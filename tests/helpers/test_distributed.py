"""What tests of several processes make of ranks that end in their own ways."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.distributed import DistributedTestError, run_distributed


def aborts(rank: int, world_size: int, when: str) -> int:
    if when == "while it ends" and rank == 1:
        atexit.register(os.abort)
    if when == "before its work is done" and rank == 1:
        os.abort()
    return rank


def test_a_rank_that_aborts_while_it_ends_has_done_its_work() -> None:
    assert run_distributed(aborts, 2, "while it ends", fresh=True) == [0, 1]


def test_a_rank_that_aborts_before_is_a_failure() -> None:
    with pytest.raises(DistributedTestError, match="rank 1 died with exit code -6"):
        run_distributed(aborts, 2, "before its work is done")


OF_THE_CALLER = "not changed"


def surroundings(rank: int, world_size: int) -> tuple[str | None, str, str]:
    print(f"rank {rank} prints", flush=True)
    print(f"rank {rank} complains", file=sys.stderr, flush=True)
    return os.environ.get("OPACUS_FOR_THIS_TEST"), os.getcwd(), OF_THE_CALLER


def test_ranks_take_over_variables_folder_and_output_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_distributed(surroundings, 1)  # whatever the server was started with
    for value in ("1", None):
        if value is None:
            monkeypatch.delenv("OPACUS_FOR_THIS_TEST")
        else:
            monkeypatch.setenv("OPACUS_FOR_THIS_TEST", value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys.modules[__name__], "OF_THE_CALLER", "changed")
        capfd.readouterr()
        found = run_distributed(surroundings, 2)
        assert found == [(value, str(tmp_path), "not changed")] * 2
        shown = capfd.readouterr()
        for rank in (0, 1):
            assert f"rank {rank} prints" in shown.out and f"rank {rank} complains" in shown.err
