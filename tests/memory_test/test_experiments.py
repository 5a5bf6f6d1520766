"""The scripts, run as a user runs them, on two gloo processes with the model tiny."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from memory_test.common.phases import PHASES
from memory_test.common.results import check_result
from tests.helpers.warm_python import warm_python
from tests.memory_test.scripts import FLASH, PROFILING, forked, run

SINGLE = PROFILING / "single_experiment.py"
ALL = PROFILING / "run_all_experiments.sh"
DEFERRED = PROFILING / "test_deferred_norm.py"
TINY = ("--model-name", "tiny", "--seq-length", 16, "--device", "cpu", "--num-iter", 2)


def test_one_experiment_gives_all_that_was_promised(tmp_path):
    output = tmp_path / "new" / "result.json"
    done = run(
        *(SINGLE, "--mode", "ghost_fsdp", *TINY, "--output", output),
        python=sys.executable,
        OPACUS_USE_DEFERRED_NORM="1",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert check_result(result) == []
    assert (result["mode"], result["seq_length"], result["num_processes"]) == ("ghost_fsdp", 16, 2)
    assert result["total_batch_size"] == 2 and result["num_gpus"] == 0 and result["deferred"]
    assert len(result["times_ms"]) == 2 and "ms a step" in done.stdout
    phases = result["phases_ms"]
    assert set(phases) == {*PHASES, "reduction"}
    for name in (
        "forward",
        "first_backward",
        "parallel_norms",
        "clip_factors",
        "second_backward",
        "noise",
        "step",
    ):
        assert phases[name] > 0, name
    # Each process' phases add up to its step; the table has the largest of each, which of two
    # processes that are interrupted by turns add up to two steps.
    stacked = sum(v for k, v in phases.items() if k != "reduction")
    assert 0.8 * result["min_time_ms"] < stacked < 2.1 * result["max_time_ms"]
    assert phases["reduction"] > 0 and result["collectives_ms"]["all_gather"] > 0
    memory = result["memory_mb"]
    assert all(memory[k] > 0 for k in ("parameters", "gradients", "activations", "norm_cache"))
    assert result["config"]["environment"]["OPACUS_USE_DEFERRED_NORM"] == "1"
    assert "token" not in result["config"]


def test_an_unknown_mode_leaves_the_earlier_result(tmp_path):
    output = tmp_path / "result.json"
    output.write_text('{"earlier": 1}')
    done = run(SINGLE, "--mode", "nonsense", *TINY, "--output", output)
    assert done.returncode == 2
    assert "no such mode; there are: no_dp" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(output.read_text()) == {"earlier": 1}
    record = json.loads((tmp_path / "result.failure.json").read_text())
    assert (record["status"], record["kind"], record["mode"]) == ("failed", "usage", "nonsense")


@pytest.mark.slow
def test_a_hang_and_an_oom_are_recorded_and_the_rest_is_run(tmp_path):
    env = {"MODEL": "tiny", "LENGTHS": "16", "MODES": "hooks ghost no_dp_single", "DEFERRED": "0",
           "OUT": str(tmp_path), "EXTRA": "--device cpu", "TIMEOUT": "45", "NUM_ITER": "1",
           "WARMUP_ITER": "1"}  # fmt: skip
    done = run(ALL, **env, MEMORY_TEST_PLANT="oom:hooks,hang:ghost")
    assert done.returncode == 1 and "1 measured, 2 failed" in done.stdout, done.stdout
    kinds = {
        mode: json.loads((tmp_path / f"tiny/{mode}_T16_B1/result.failure.json").read_text())["kind"]
        for mode in ("hooks", "ghost")
    }
    assert kinds == {"hooks": "out_of_memory", "ghost": "timeout"}
    result = tmp_path / "tiny/no_dp_single_T16_B1/result.json"
    assert check_result(json.loads(result.read_text())) == []

    # Run again: the result stays as it is, and the failures are tried again.
    before = result.stat().st_mtime_ns
    again = run(ALL, **env)
    assert again.returncode == 0 and "3 measured, 0 failed" in again.stdout, again.stdout
    assert result.stat().st_mtime_ns == before
    assert not (tmp_path / "tiny/hooks_T16_B1/result.failure.json").exists()


def test_a_finished_series_runs_nothing(tmp_path):
    folder = tmp_path / "tiny/hooks_T16_B1"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    failed = tmp_path / "tiny/ghost_T16_B1"
    failed.mkdir()
    (failed / "result.failure.json").write_text("{}")
    env = {
        "MODEL": "tiny",
        "LENGTHS": "16",
        "MODES": "hooks ghost",
        "DEFERRED": "0",
        "OUT": str(tmp_path),
    }
    done = run(ALL, **env, RETRY="0", python="false")
    assert done.returncode == 1
    assert "1 measured, 1 failed: ghost_T16_B1" in done.stdout


def test_deferred_norms_are_correct():
    done = forked(DEFERRED, "--mode", "correctness", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("✓ CORRECTNESS TEST PASSED!")
    assert "ghost_fsdp: same numbers" in done.stdout


@pytest.mark.slow
def test_performance_passes_only_within_its_limits(tmp_path):
    short = (
        "--mode",
        "performance",
        "--device",
        "cpu",
        "--rounds",
        1,
        "--num-iter",
        2,
        "--seq-length",
        16,
    )
    output = tmp_path / "performance.json"
    done = forked(DEFERRED, *short, "--slower", 10, "--output", output, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ PERFORMANCE TEST PASSED!" in done.stdout
    assert json.loads(output.read_text())["passed"]

    failed = forked(DEFERRED, *short, "--min-speedup", 1000, ranks=2)
    assert failed.returncode == 1
    assert "PASSED" not in failed.stdout and "✗ PERFORMANCE TEST FAILED" in failed.stdout


@pytest.mark.slow
def test_one_process_agrees_with_two(tmp_path):
    short = ("--device", "cpu", "--steps", 2, "--deferred", 1, "--grad-sample-mode", "ghost_fsdp")
    script = FLASH / "test_accuracy_comparison.py"
    done = forked(script, *short, "--output-dir", tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ ACCURACY TEST PASSED!" in done.stdout
    for name in ("report.md", "accuracy.json", "accuracy.png"):
        assert (tmp_path / name).stat().st_size > 500
    rows = json.loads((tmp_path / "accuracy.json").read_text())["rows"]
    assert rows[0]["inflation"] > 1.2  # what summing over ranks would do is shown

    failed = run(  # which starts the processes itself
        script, *short, "--layouts", "sharded", "--norm-error", 0, "--output-dir", tmp_path
    )
    assert failed.returncode == 1 and "PASSED" not in failed.stdout


def test_the_norm_benchmark_checks_what_it_times(tmp_path):
    output = tmp_path / "norms.json"
    options = ("--model-name", "tiny", "--seq-length", 8, "--batch-size", 2, "--num-iter", 2)
    done = forked(
        FLASH / "benchmark_norm_parallel.py",
        *options,
        *("--device", "cpu", "--output", output),
        ranks=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert {r["layout"]: r["samples"] for r in rows} == {"sharded": 2, "replicated": 4}
    assert all(r["error"] < 1e-5 and r["local_ms"] > 0 and r["reduction_ms"] > 0 for r in rows)


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    """The command of the README, with the ranks that torchrun starts."""
    output = tmp_path / "result.json"
    words = f"-m torch.distributed.run --standalone --nproc_per_node=2 {SINGLE} --mode no_dp"
    command = [sys.executable, *shlex.split(words), *map(str, TINY), "--output", str(output)]
    env = {**os.environ, "PYTHON_EXEC": warm_python()}  # of the ranks
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["num_processes"] == 2
