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
from tests.memory_test.scripts import MEMORY_TEST, forked, run

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
    modes = "ghost_fsdp_bk,ghost_fsdp_bk+accumulate=2"
    done = run(STEPS, "--suite", "tiny-fsdp", "--modes", modes, *SHORT, "--output", output)
    assert done.returncode == 0, done.stderr
    return output, done.stdout


def test_two_ranks_are_measured_against_the_non_private_step(sharded):
    path, printed = sharded
    found = step_results.read(path)
    (cell,) = found["cells"]
    baseline, plain, private, accumulated = cell["rows"]
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
    assert step_results.label(plain) == accumulated["like"]["mode"] == "no_dp+accumulate=2"
    assert private["like"]["ratio"] == private["ratio"] != accumulated["like"]["ratio"]
    assert all(check["sum_error"] < 1e-5 for check in accumulated["checks"])


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
        (lambda f: f["cells"][0]["rows"][2].update(checks=[]), "without a check"),
        (lambda f: f["cells"][0]["rows"][2]["checks"][0].update(holds=False), "without a check"),
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


@pytest.mark.parametrize(
    "error, end, status",
    [
        ("CUDA out of memory. Tried to allocate 1 GiB", EXIT_MEMORY, "out_of_memory"),
        ("not this one", EXIT_FAILED, "failed"),
    ],
)
def test_what_fails_is_recorded_and_the_others_go_on(tmp_path, monkeypatch, error, end, status):
    inner = step_timing.build

    def build(recipe, way, runtime, peak=0.0):
        if way.mode == "ghost_bk":
            raise RuntimeError(error)
        return inner(recipe, way, runtime, peak)

    monkeypatch.setattr(step_timing, "build", build)
    modes = ("--modes", "ghost_bk,hooks", "--checks", "none")
    done, found = here(tmp_path, "--suite", "tiny-single", *modes)
    rows = found["cells"][0]["rows"]
    assert done == end and [row["status"] for row in rows] == ["ok", status, "ok"]
    assert error in rows[1]["error"] and found["unchecked"] == "modes were not checked"
    assert schema.check_file(found) == []


FEATURES = (
    "ghost_fsdp_bk+nologits+offload+accumulate=2", "ghost_fsdp+nologits", "ghost_fsdp_bk+float8",
    "ghost_fsdp_bk+held=0GiB", "ghost_fsdp_bk+budget=1x", "ghost_fsdp_bk+budget=2.5GiB",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
def test_features_of_a_way_are_right_and_compared_with_their_like(tmp_path):
    """On one rank, as on one card: a checkpointed model with a tied head."""
    arguments = ("--model", "tiny-tied", "--checkpointing", "--modes", ",".join(FEATURES))
    status, found = here(tmp_path, "--suite", "tiny-fsdp", *arguments)
    assert status == 0 and schema.check_file(found) == []
    (cell,) = found["cells"]
    rows = {step_results.label(row): row for row in cell["rows"]}
    shared = "no_dp+nologits+offload+accumulate=2"
    assert list(rows) == ["no_dp", shared, "no_dp+nologits", *FEATURES]
    likes = [rows[name]["like"]["mode"] for name in FEATURES]
    assert likes == [shared, "no_dp+nologits", *["no_dp"] * 4]
    for name in FEATURES:
        assert [c["what"] for c in rows[name]["checks"]] == ["small float32", "full float32"]
        assert all(c["sum_error"] < 1e-5 for c in rows[name]["checks"] if "float8" not in name)
    replays = {name: "replay" in rows[name].get("ways", ()) for name in FEATURES}
    assert [name for name, again in replays.items() if again] == list(FEATURES[3:5])
    assert rows[FEATURES[4]]["budget_gib"] == pytest.approx(rows["no_dp"]["peak_gb"], abs=1e-2)
    assert rows[FEATURES[5]]["budget_gib"] == 2.5


@pytest.mark.parametrize(
    "wrapping, modes",
    [("hsdp", "ghost_fsdp_bk+nologits,ghost_fsdp_bk+accumulate=2"), ("tp", "ghost_fsdp")],
)
def test_meshes_of_four_ranks(tmp_path, wrapping, modes):
    output = tmp_path / "result.json"
    arguments = ("--model", "tiny-llama", "--wrapping", wrapping, "--modes", modes)
    run_as = ("--suite", "tiny-fsdp", *arguments, *SHORT, "--iters", "1", "--output", output)
    done = forked(STEPS, *run_as, ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    rows = [row for row in found["cells"][0]["rows"] if row["private"]]
    assert found["world"] == 4 and len(rows) == len(modes.split(","))
    tokens = rows[0]["tokens_per_second"] * rows[0]["ms"]["median"] / 1e3
    assert tokens == pytest.approx(32 / (1 + (wrapping == "tp")), abs=1)
    for check in (check for row in rows for check in row["checks"]):
        assert check["norm_error"] < 1e-5 and check["sum_error"] < 1e-5
        of_ranks = 2 if wrapping == "tp" else 4
        assert check["samples"] == of_ranks * (3 if "small" in check["what"] else 2)


def test_adapters_are_trained_alone(tmp_path):
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
    text = "ghost_bk+deferred+compiled+nologits+offload+accumulate=8+float8+budget=1.15x+held=3GiB"
    (way,) = ways_of(text)
    assert str(way) == text and way.budget.bytes(100) == 115 and way.held.bytes() == 3 * 2**30
    assert str(way.baseline) == "no_dp_compiled+nologits+offload+accumulate=8"
    for wrong in ("fast", "compiled=2", "accumulate", "accumulate=1", "budget=3", "held=1.2x"):
        with pytest.raises(UsageError, match="--modes ghost"):
            ways_of(f"ghost+{wrong}")
    for text in ("4", "4x", "0x8", "4x1"):
        with pytest.raises(UsageError, match="--cells"):
            cells_of(text)
    with pytest.raises(UsageError, match="non-private"):
        ways_of("no_dp")
    with pytest.raises(UsageError, match="--suite"):
        suite_of("none")
    text = (MEMORY_TEST / "benchmarks" / "README.md").read_text()
    for name, suite in SUITES.items():
        assert all(way.mode in MODES for way in suite.ways)
        assert f"`{name}`" in text
        assert {way.baseline for way in suite.ways} <= set(suite.baselines())
    done = run(STEPS, "--suite", "tiny-single", "--modes", "ghost_xl", *SHORT)
    assert done.returncode == EXIT_USAGE and "ghost_xl" in done.stderr


def test_nothing_new_is_started_without_time(tmp_path, capsys):
    arguments = ("--suite", "tiny-single", "--cells", "2x8,2x16", "--budget", "0")
    output = tmp_path / "result.json"
    assert steps.measure(steps.parse([*SHORT, "--output", str(output), *arguments])) == 0
    assert "not started" in capsys.readouterr().out and not output.exists()
