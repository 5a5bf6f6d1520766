"""The host's share of a step: the script measures it, and it stays small."""

from __future__ import annotations

import json

import pytest
import torch

from memory_test.benchmarks.host_overhead import chosen_ways, count, main, parse, table
from tests.memory_test.scripts import MEMORY_TEST, forked

SCRIPT = MEMORY_TEST / "benchmarks" / "host_overhead.py"


def test_it_measures_one_process_and_two(tmp_path) -> None:
    output = tmp_path / "overhead.json"
    settings = "one process,FSDP2 on two"
    modes = "ghost_bk,ghost,ghost_fsdp_bk"
    done = forked(
        SCRIPT,
        *("--iters", "1", "--settings", settings, "--modes", modes, "--output", output),
        *("--timeout", "250"),
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    found = {(row["setting"], row["mode"]): row for row in rows}
    assert list(found) == [
        *(("one process", mode) for mode in ("no_dp", "ghost_bk", "ghost")),
        *(("FSDP2 on two", mode) for mode in ("no_dp", "ghost_fsdp_bk")),
    ]
    assert all(row["ms"] > 0 and row["layers"] == 147 for row in rows)
    assert done.stdout.splitlines() == table(rows).splitlines()
    # Operations depend neither on the machine nor on chance: the noise of each parameter (its
    # counters take a few, and on a CPU the mean one), one each for norm and weighted sum;
    # normalisation layers take more. Two passes take most of a backward, and two norms a layer that
    # compare the second pass with the first.
    each = {key: row["added_operations"] / row["layers"] for key, row in found.items()}
    limits = {
        ("one process", "no_dp"): (0, 0),
        ("one process", "ghost_bk"): (2, 10),  # 9.5
        ("one process", "ghost"): (8, 22),  # 21.4
        ("FSDP2 on two", "no_dp"): (0, 0),
        ("FSDP2 on two", "ghost_fsdp_bk"): (2, 10),  # 9.5
    }
    beyond = {k: n for k, n in each.items() if not limits[k][0] <= n <= limits[k][1]}
    assert not beyond  # all of them: one must not hide another


def test_operations_are_counted_without_views_and_allocations() -> None:
    x = torch.ones(2, 3)
    assert count(lambda: x.t()[0].view(2).add(1)) == {"aten.add": 1}
    assert count(lambda: torch.empty(3).fill_(2.0)) == {"aten.fill_": 1}


def test_only_modes_of_the_setting_are_chosen() -> None:
    names = [str(way) for way in chosen_ways("one process", "ghost_fsdp,ghost+deferred")]
    assert names == ["no_dp", "ghost+deferred"]
    for wrong in (["--settings", "three"], ["--iters", "0"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_a_failure_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--iters", "1", "--settings", "one process", "--modes", "no_dp"]) != 0
