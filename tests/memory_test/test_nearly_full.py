"""Steps for which memory is short: the script runs, and says what has failed."""

from __future__ import annotations

import json

from memory_test.common.schema import check_file
from tests.memory_test.scripts import MEMORY_TEST, forked

SCRIPT = MEMORY_TEST / "benchmarks" / "nearly_full.py"


def test_it_measures_each_share_of_memory(tmp_path) -> None:
    output = tmp_path / "full.json"
    more = "--model", "tiny", "--cell", "2x16", "--steps", "2", "--shares", "1.2"
    done = forked(SCRIPT, *more, "--output", output, ranks=1)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert not check_file(found)
    rows = [(row["mode"], row["share"]) for row in found["nearly_full"]]
    modes = "no_dp", "ghost_fsdp_bk"
    assert rows == [(mode, share) for share in (None, 1.2) for mode in modes]
    assert all(len(row["times_ms"]) == 2 for row in found["nearly_full"])
