"""Many experiments in one set of processes, and their results in one file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from memory_test.common.results import check_result, read_results
from memory_test.common.schema import LAYOUT
from tests.memory_test.scripts import PROFILING, run

SERIES = PROFILING / "run_series.py"
COLLECT = PROFILING / "collect_results.py"
DATA = Path(__file__).parent / "data" / "results"
TINY = "--model-name tiny --seq-length 16 --num-iter 1"


def series(
    tmp_path: Path, modes: str, *options: object, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a line of each of ``modes``, whose options follow a comma."""
    lines = [f"--mode {mode.replace(',', ' ')} {TINY}" for mode in modes.split()]
    (tmp_path / "plan").write_text("# a comment\n\n" + "\n".join(lines) + "\n")
    words = (tmp_path / "plan", "--output-dir", tmp_path / "out", "--device", "cpu", *options)
    return run(SERIES, *words, **env)


def record(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "out" / "tiny" / name).read_text())


def test_one_process_goes_on_after_a_failure_and_later_where_it_stopped(tmp_path):
    modes = "no_dp_single hooks nonsense ghost,--deferred,1"
    plant = {"MEMORY_TEST_PLANT": "oom:hooks"}
    done = series(tmp_path, modes, "--num-processes", 1, **plant)
    assert done.returncode == 1, done.stderr
    assert "2 measured, 2 failed, 0 left" in done.stdout
    for name in ("no_dp_single_T16_B1", "ghost_T16_B1_deferred"):
        assert check_result(record(tmp_path, f"{name}/result.json")) == []
    assert record(tmp_path, "ghost_T16_B1_deferred/result.json")["deferred"]
    assert record(tmp_path, "hooks_T16_B1/result.failure.json")["kind"] == "out_of_memory"
    assert record(tmp_path, "nonsense_T16_B1/result.failure.json")["kind"] == "usage"

    measured = tmp_path / "out/tiny/no_dp_single_T16_B1/result.json"
    before = measured.stat().st_mtime_ns
    again = series(tmp_path, modes.replace("nonsense ", ""), "--num-processes", 1)
    assert again.returncode == 0 and "3 measured, 0 failed" in again.stdout, again.stdout
    assert measured.stat().st_mtime_ns == before
    assert not (tmp_path / "out/tiny/hooks_T16_B1/result.failure.json").exists()


@pytest.mark.slow
def test_ranks_are_started_again_after_a_failure(tmp_path):
    done = series(
        tmp_path,
        "ghost_fsdp hooks no_dp",
        "--num-processes",
        2,
        MEMORY_TEST_PLANT="oom:ghost_fsdp",
    )
    assert done.returncode == 1 and "1 measured, 2 failed, 0 left" in done.stdout, done.stderr
    assert record(tmp_path, "no_dp_T16_B1/result.json")["num_processes"] == 2
    assert record(tmp_path, "ghost_fsdp_T16_B1/result.failure.json")["kind"] == "out_of_memory"
    assert record(tmp_path, "hooks_T16_B1/result.failure.json")["kind"] == "usage"


@pytest.mark.slow
def test_a_run_that_hangs_is_given_up(tmp_path):
    modes = "ghost,--timeout,4 no_dp_single"
    done = series(tmp_path, modes, "--num-processes", 1, MEMORY_TEST_PLANT="hang:ghost")
    assert "1 measured, 1 failed, 0 left" in done.stdout, done.stderr
    assert record(tmp_path, "ghost_T16_B1/result.failure.json")["kind"] == "timeout"


def test_nothing_is_begun_without_time(tmp_path):
    done = series(tmp_path, "no_dp_single", "--num-processes", 1, "--budget", 0)
    assert done.returncode == 1 and "0 measured, 0 failed, 1 left" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"), [("--mode", "line 1 of the plan"), (None, "cannot be read")]
)
def test_a_plan_that_is_not_understood(tmp_path, line, message):
    if line:
        (tmp_path / "plan").write_text(line)
    done = run(SERIES, tmp_path / "plan", "--output-dir", tmp_path, "--num-processes", 1)
    assert done.returncode == 2 and message in done.stderr


def test_it_is_not_for_torchrun(tmp_path):
    (tmp_path / "plan").write_text("--mode ghost")
    done = run(SERIES, tmp_path / "plan", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2 and "leave torchrun out" in done.stderr


# --- one file ---


def test_a_file_holds_what_the_folder_held(tmp_path):
    output = tmp_path / "all" / "series.json"
    other = tmp_path / "in"
    (other / "norms").mkdir(parents=True)
    (other / "norms.json").write_text('{"kind": "norms", "rows": []}')
    (other / "broken.json").write_text("{")
    for folder in (DATA, other):
        done = run(COLLECT, "--input-dir", folder, "--output", output, "--what", "a try")
        assert done.returncode == 0, done.stderr
        if folder == DATA:
            results, failures, unread = read_results(DATA)
            again = read_results(output.parent)
            assert [len(found) for found in again] == [len(results), len(failures), 0]
            assert not unread
    assert "left out" in done.stderr and "broken.json" in done.stderr
    found = json.loads(output.read_text())
    assert found["layout"] == LAYOUT and found["what"] == "a try" and len(found["norms"]) == 1


def test_a_failure_that_was_mended_is_left_out(tmp_path):
    result = next(DATA.rglob("result.json"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/result.json").write_text(result.read_text())
    (tmp_path / "in/result.failure.json").write_text('{"status": "failed"}')
    done = run(COLLECT, "--input-dir", tmp_path / "in", "--output", tmp_path / "out.json")
    assert done.stdout.startswith("1 results: written"), done.stdout + done.stderr


def test_nothing_to_collect(tmp_path):
    done = run(COLLECT, "--input-dir", tmp_path, "--output", tmp_path / "out.json")
    assert done.returncode == 2 and "no results" in done.stderr
