"""The step benchmark: it measures in turns, and refuses to report a mode that is wrong."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch

from memory_test.benchmarks import plot, step_results, step_timing, steps
from memory_test.benchmarks.cases import SUITES, Cell, cells_of, suite_of
from memory_test.benchmarks.contenders import Recipe
from memory_test.benchmarks.step_check import small_checks
from memory_test.benchmarks.step_timing import Plan, Taken, measure_cell
from memory_test.benchmarks.ways import Way, ways_of
from memory_test.common import schema
from memory_test.common.failures import EXIT_FAILED, EXIT_MEMORY, EXIT_USAGE, UsageError
from memory_test.common.launch import Runtime
from opacus.core.step.modes import MODES
from tests.memory_test.scripts import MEMORY_TEST, run

STEPS = MEMORY_TEST / "benchmarks" / "steps.py"
HERE = Runtime(0, 1, torch.device("cpu"))
SHORT = ("--iters", "2", "--warmup", "1", "--device", "cpu")


def here(tmp_path, *arguments: str) -> tuple[int, dict]:
    """Exit status and file of a run in this process."""
    output = tmp_path / "result.json"
    status = steps.measure(steps.parse([*SHORT, "--output", str(output), *arguments]))
    return status, json.loads(output.read_text())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A run of two gloo processes, and what it printed."""
    output = tmp_path_factory.mktemp("steps") / "fsdp.json"
    done = run(STEPS, "--suite", "tiny-fsdp", *SHORT, "--output", output)
    assert done.returncode == 0, done.stderr
    return output, done.stdout


def test_two_ranks_are_measured_against_the_non_private_step(sharded):
    path, printed = sharded
    found = step_results.read(path)
    (cell,) = found["cells"]
    baseline, private = cell["rows"]
    assert found["world"] == 2 and (cell["batch"], cell["tokens"]) == (2, 16)
    assert (baseline["mode"], private["mode"]) == ("no_dp", "ghost_fsdp_bk")
    assert len(baseline["ms"]["all"]) == len(private["ms"]["all"]) == 2
    assert private["ratio"] == pytest.approx(
        private["ms"]["median"] / baseline["ms"]["median"], abs=1e-3
    )
    small, full = private["checks"]
    assert small["samples"] == 6 and 0 < small["clipped"] < 6
    assert full["samples"] == 4 and small["sum_error"] < 1e-5 and full["norm_error"] < 1e-5
    assert "ghost_fsdp_bk" in printed


def test_a_file_becomes_a_plot_and_a_table(sharded, tmp_path):
    png, table = tmp_path / "ratios.png", tmp_path / "table.md"
    assert plot.main([str(sharded[0]), "--png", str(png), "--markdown", str(table)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "| tiny 2x16 | `ghost_fsdp_bk` |" in table.read_text()
    (tmp_path / "other.json").write_text("{}")
    assert plot.main([str(tmp_path / "other.json")]) == EXIT_USAGE


def test_the_layout_is_checked(sharded):
    good = json.loads(sharded[0].read_text())
    assert schema.check_file(good) == []
    for spoil, words in [
        (lambda f: f.pop("date"), "lacks date"),
        (lambda f: f["cells"][0].pop("batch"), "lacks batch"),
        (lambda f: f["cells"][0]["rows"][1].pop("ratio"), "lacks ratio"),
        (lambda f: f["cells"][0]["rows"][1].update(checks=[]), "without a check"),
        (lambda f: f["cells"][0]["rows"][1]["checks"][0].update(holds=False), "without a check"),
        (lambda f: f["cells"][0]["rows"][1].update(status="refused"), "has times"),
    ]:
        bad = copy.deepcopy(good)
        spoil(bad)
        assert any(words in wrong for wrong in schema.check_file(bad)), words


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "flash_bk", "hooks"])
def test_modes_of_one_process_pass(tmp_path, mode):
    status, found = here(tmp_path, "--suite", "tiny-single", "--modes", mode)
    assert status == 0
    checks = found["cells"][0]["rows"][1]["checks"]
    assert max(c["norm_error"] for c in checks) < 1e-5


def test_a_mode_with_wrong_factors_is_refused(tmp_path, monkeypatch, capsys):
    from opacus.core.privacy.clipping import Clipped, clip_flat

    def twice(*given):
        right = clip_flat(*given)
        return Clipped(right.factors * 2, right.excluded)

    places = _modules_with("clip_flat", clip_flat)
    assert places
    for place in places:
        monkeypatch.setattr(place, "clip_flat", twice)
    status, found = here(tmp_path, "--suite", "tiny-single", "--modes", "ghost_bk")
    row = found["cells"][0]["rows"][1]
    assert status == EXIT_FAILED and row["status"] == "refused"
    assert "ms" not in row and "ratio" not in row
    assert "clipped sum" in row["error"] and "ghost_bk" in capsys.readouterr().out
    assert schema.check_file(found) == []


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_a_mode_with_wrong_norms_is_refused(monkeypatch, mode):
    from opacus.core.norms import ledger as norms

    inner = norms.NormLedger.finish

    def larger(self, *args):
        return {name: value * 1.01 for name, value in inner(self, *args).items()}

    monkeypatch.setattr(norms.NormLedger, "finish", larger)
    recipe = Recipe(SUITES["tiny-single"], 16, 2, torch.float32)
    checks = small_checks(recipe, Way(mode), HERE)
    assert checks and not any(check.holds for check in checks)
    assert "norms differ by 5" in str(checks[0])


def _modules_with(name, value):
    return [m for n, m in list(sys.modules.items())
            if n.startswith("opacus") and getattr(m, name, None) is value]  # fmt: skip


def test_contenders_take_turns(monkeypatch):
    turns = []
    inner = step_timing.Contender.step

    def watched(self, ids):
        turns.append(str(self.way))
        inner(self, ids)

    monkeypatch.setattr(step_timing.Contender, "step", watched)
    recipe = Recipe(SUITES["tiny-single"], 8, 2, torch.float32)
    ways = [Way("no_dp"), Way("ghost_bk", deferred=True)]
    one, other = map(str, ways)
    measure_cell(recipe, Cell(2, 8), ways, Plan(iters=3, warmup=1), HERE)
    assert turns == [one, other, one, other, other, one, one, other]
    turns.clear()
    taken = measure_cell(recipe, Cell(2, 8), ways, Plan(iters=4, warmup=1, rounds=2), HERE)
    assert turns == [*[one] * 3, *[other] * 3, *[other] * 3, *[one] * 3]
    assert [len(t.times_ms) for t in taken] == [4, 4]


def test_memory_that_runs_out_is_recorded(tmp_path, monkeypatch):
    inner = step_timing.build

    def build(recipe, way, runtime, peak=0.0):
        if way.private:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return inner(recipe, way, runtime, peak)

    monkeypatch.setattr(step_timing, "build", build)
    status, found = here(tmp_path, "--suite", "tiny-single")
    baseline, private = found["cells"][0]["rows"]
    assert status == EXIT_MEMORY
    assert baseline["status"] == "ok" and private["status"] == "out_of_memory"
    assert schema.check_file(found) == []


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_are_trained_alone(tmp_path):
    pytest.importorskip("peft")
    arguments = ("--model", "tiny-llama", "--lora", "4", "--modes", "ghost_bk")
    status, found = here(tmp_path, "--suite", "tiny-single", *arguments)
    (cell,) = found["cells"]
    assert status == 0 and cell["lora_rank"] == 4
    assert 0 < cell["trainable_parameters"] < cell["parameters"] / 5


def test_ratios_of_neighbouring_steps():
    base = Taken(Way("no_dp"), [10.0, 20.0, 10.0], peak_mb=1024.0)
    other = Taken(Way("ghost_bk"), [11.0, 22.0, 13.0], peak_mb=1536.0)
    row = step_results.rows_of([base, other])[1]
    assert row["ratio"] == 1.3 and row["memory_ratio"] == 1.5
    assert row["ratio_quartiles"] == [1.1, 1.2]


def test_what_can_be_asked_for(tmp_path):
    assert cells_of("4x4096,2x8") == (Cell(4, 4096), Cell(2, 8))
    assert ways_of("ghost,ghost_bk+deferred") == (Way("ghost"), Way("ghost_bk", True))
    for text in ("4", "4x", "0x8", "4x1"):
        with pytest.raises(UsageError, match="--cells"):
            cells_of(text)
    with pytest.raises(UsageError, match="non-private"):
        ways_of("no_dp")
    with pytest.raises(UsageError, match="--suite"):
        suite_of("none")
    for suite in SUITES.values():
        assert all(way.mode in MODES for way in suite.ways)
    done = run(STEPS, "--suite", "tiny-single", "--modes", "ghost_xl", *SHORT)
    assert done.returncode == EXIT_USAGE and "ghost_xl" in done.stderr


def test_nothing_new_is_started_without_time(tmp_path, capsys):
    arguments = ("--suite", "tiny-single", "--cells", "2x8,2x16", "--budget", "0")
    output = tmp_path / "result.json"
    assert steps.measure(steps.parse([*SHORT, "--output", str(output), *arguments])) == 0
    assert "not started" in capsys.readouterr().out and not output.exists()
