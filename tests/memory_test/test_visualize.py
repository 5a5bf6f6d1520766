"""Plots and tables from a small committed set of results (two CPU processes, model tiny)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from memory_test.common.comparison import group_results
from memory_test.common.results import check_result, read_results

DATA = Path(__file__).parent / "data" / "results"
SCRIPT = (
    Path(__file__).resolve().parents[2] / "memory_test/fsdp_llama3_profiling/visualize_results.py"
)
PLOTS = (
    "time",
    "memory",
    "memory_vs_time",
    "overhead",
    "deferred_vs_immediate",
    "phases",
    "memory_breakdown",
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("visualize_results", SCRIPT)
    path = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="module")
def drawn(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plots")
    assert script.main(["--input-dir", str(DATA), "--output-dir", str(folder)]) == 0
    return folder


def run(script, source: Path, target: Path) -> int:
    return script.main(["--input-dir", str(source), "--output-dir", str(target)])


@pytest.mark.parametrize("name", PLOTS)
def test_no_picture_is_blank(drawn, name):
    import matplotlib.image

    picture = matplotlib.image.imread(drawn / f"{name}.png")
    height, width = picture.shape[:2]
    assert width > 800 and height > 200
    assert picture[..., :3].std() > 0.05  # something is drawn,
    assert (picture[..., :3].min(axis=2) > 0.99).mean() > 0.5  # on white


def test_the_summary_holds_every_run_and_failure(drawn):
    text = (drawn / "summary.md").read_text()
    results, failures, unread = read_results(DATA)
    assert results and failures and not unread
    for result in results:
        assert f"| {result['median_time_ms']:.1f} |" in text
    assert "## Runs without a result" in text and "out of memory" in text
    assert "### Deferred against immediate norms" in text and "1.00×" in text
    for name in PLOTS:
        assert f"]({name}.png)" in text


def test_committed_results_have_the_schema():
    for path in DATA.rglob("result.json"):
        assert check_result(json.loads(path.read_text())) == []


def test_ratios_are_to_the_run_without_privacy():
    group = group_results(read_results(DATA)[0])[0]
    for result in group.results:
        base = next(
            r
            for r in group.results
            if r["mode"] == "no_dp" and r["seq_length"] == result["seq_length"]
        )
        assert (
            group.ratio(result, "median_time_ms")
            == result["median_time_ms"] / base["median_time_ms"]
        )


def test_pairs_differ_in_deferral_only():
    pairs = group_results(read_results(DATA)[0])[0].pairs()
    assert pairs
    for one, other in pairs:
        assert not one["deferred"] and other["deferred"]
        assert (one["mode"], one["seq_length"]) == (other["mode"], other["seq_length"])


def test_the_latest_of_equal_runs_counts():
    results = read_results(DATA)[0]
    again = {**results[0], "date": "2999-01-01 00:00:00", "median_time_ms": 12345.0}
    group = group_results([again, *results])[0]
    assert sum(len(g.results) for g in group_results([again, *results])) == len(results)
    assert any(r["median_time_ms"] == 12345.0 for r in group.results)


def test_one_length_and_no_baseline_can_be_drawn(script, tmp_path):
    source = next(p for p in DATA.rglob("result.json") if "ghost_fsdp_T32" in str(p))
    shutil.copy(source, tmp_path / "only.json")
    assert run(script, tmp_path, tmp_path / "plots") == 0
    assert (tmp_path / "plots/time.png").exists()
    assert not (tmp_path / "plots/overhead.png").exists()  # nothing to compare with


def test_two_models_have_pictures_of_their_own(script, tmp_path):
    for path in DATA.rglob("result.json"):
        result = json.loads(path.read_text())
        if result["seq_length"] == 32 and result["mode"] == "no_dp":
            (tmp_path / "a.json").write_text(json.dumps(result))
            (tmp_path / "b.json").write_text(json.dumps({**result, "model": "other/name"}))
    assert run(script, tmp_path, tmp_path / "plots") == 0
    assert len(list((tmp_path / "plots").glob("*_cpu_time.png"))) == 2


def test_other_files_are_skipped_and_named(script, tmp_path, capsys):
    shutil.copytree(DATA, tmp_path / "in")
    (tmp_path / "in/broken.json").write_text("{")
    (tmp_path / "in/other.json").write_text('{"rows": []}')
    assert run(script, tmp_path / "in", tmp_path / "out") == 0
    told = capsys.readouterr().err
    assert "broken.json" in told and "other.json: lacks status" in told
    assert "## Files that are no results" in (tmp_path / "out/summary.md").read_text()


def test_nothing_to_draw(script, tmp_path, capsys):
    assert run(script, tmp_path, tmp_path / "out") == 2
    assert run(script, tmp_path / "missing", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert "no results (0 failures" in told and "no such folder" in told


def test_a_folder_that_cannot_be_made(script, tmp_path):
    (tmp_path / "file").write_text("")
    assert run(script, DATA, tmp_path / "file") == 2


def test_runs_with_activation_checkpointing_are_compared_among_themselves():
    results = read_results(DATA)[0]
    again = [{**r, "config": {**r["config"], "checkpointing": True}} for r in results]
    plain, recomputed = group_results([*again, *results])
    assert len(plain.results) == len(recomputed.results) == len(results)
    assert recomputed.slug == f"{plain.slug}_checkpointing"
    assert all(r["config"].get("checkpointing") for r in recomputed.results)
