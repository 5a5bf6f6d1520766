"""The scripts of torch_profile, run as a user runs them."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from memory_test.torch_profile import check_traces, profiling_script, recording
from memory_test.torch_profile.traces import find_traces
from tests.memory_test.scripts import MEMORY_TEST, forked, run

FOLDER = MEMORY_TEST / "torch_profile"
SCRIPT = FOLDER / "profiling_script.py"
CHECK = FOLDER / "check_traces.py"
SHELL = FOLDER / "run_profiling.sh"
SYNTAX = FOLDER / "test_syntax.py"
SMALL = ("--batch-sizes", 2, "--seq-lengths", 16)
TRAINERS = ("StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer")


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """All trainers at one small size; one of them runs out of memory."""
    folder = tmp_path_factory.mktemp("series") / "runs"
    done = forked(
        SCRIPT,
        *("--mode=test", *SMALL, "--output-dir", folder),
        MEMORY_TEST_PLANT="oom:DPSGDTrainer",
    )
    return folder, done


def missing(tmp_path, package):
    """A folder for PYTHONPATH in which ``package`` cannot be imported."""
    text = f'raise ModuleNotFoundError("No module named {package!r}")\n'
    (tmp_path / f"{package}.py").write_text(text)
    return {"PYTHONPATH": str(tmp_path)}


def test_a_run_leaves_all_that_was_promised(series):
    folder, done = series
    for name in ("StandardTrainer", "DPGhostClippingTrainer"):
        place = folder / f"{name}_B2_T16"
        result = json.loads((place / "result.json").read_text())
        assert (result["status"], result["trainer"]) == ("ok", name)
        assert (result["batch_size"], result["seq_length"], result["dtype"]) == (2, 16, "fp32")
        assert result["median_time_ms"] > 0 and result["peak_memory_mb"] > 0
        assert result["snapshot"] is None and result["versions"]["torch"] == torch.__version__
        assert [p.name for p in find_traces(place)] == [result["trace"]]
        assert len(list(place.glob("events.out.tfevents.*"))) == 1
        assert f"{name} " in done.stdout


def test_the_report_compares_the_runs(series):
    import matplotlib.image

    folder, done = series
    text = (folder / "report.md").read_text()
    assert "| DPGhostClippingTrainer | 2 | 16 |" in text and "1,121,024 parameters" in text
    assert "| run | gemm | attention | elementwise | reduce | norm | clip |" in text
    assert "second backward" in text and "`aten::" in text
    assert "## Failed\n\n- DPSGDTrainer B=2 T=16: out_of_memory" in text
    picture = matplotlib.image.imread(folder / "memory.png")
    assert min(picture.shape[:2]) > 200 and picture[..., :3].std() > 0.03
    assert "tensorboard --logdir=" in done.stdout


def test_scalars_can_be_read_without_the_plugin(series):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = series[0] / "StandardTrainer_B2_T16"
    scalars = EventAccumulator(str(place), size_guidance={"scalars": 0})
    scalars.Reload()
    result = json.loads((place / "result.json").read_text())
    (kept,) = scalars.Scalars("kinds_ms/gemm")
    assert kept.value == pytest.approx(result["kernels"]["kinds_ms"]["gemm"], rel=1e-4)
    assert len(scalars.Scalars("memory/allocated_mb")) == len(result["memory"]["curve"])


def test_out_of_memory_is_recorded_and_the_others_go_on(series):
    folder, done = series
    assert done.returncode == 3
    assert "try smaller --batch-sizes" in done.stderr and "Traceback" not in done.stderr
    place = folder / "DPSGDTrainer_B2_T16"
    assert not (place / "result.json").exists()
    record = json.loads((place / "result.failure.json").read_text())
    assert (record["status"], record["kind"]) == ("failed", "out_of_memory")
    assert (folder / "DPGhostClippingTrainer_B2_T16" / "result.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_profile_runs_on_the_cpu(series):
    """... into the folder of the series: a run that succeeds clears its failure."""
    folder, _ = series
    arguments = ("--mode=profile", "--trainers", "DPSGDTrainer", *SMALL, "--output-dir", folder)
    done = forked(SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr
    assert "CUDA is not available" in done.stdout
    place = folder / "DPSGDTrainer_B2_T16"
    assert json.loads((place / "result.json").read_text())["device"].startswith("CPU")
    assert not (place / "result.failure.json").exists()
    text = (folder / "report.md").read_text()
    assert "## Failed" not in text and "| StandardTrainer | 2 | 16 |" in text


def test_traces_are_checked(series):
    folder, _ = series
    done = forked(CHECK, folder)
    assert done.returncode == 0 and "traces PASSED" in done.stdout
    assert check_traces.main([str(folder), "--gpu"]) == 1  # there are no kernels


def test_a_damaged_trace_fails_the_check(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.pt.trace.json").write_text('{"traceEvents": [')
    assert check_traces.main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "damaged" in shown and "PASSED" not in shown


class Fewer:
    """A reader that misses events."""

    def __call__(self, path, trace):
        return [f"found none of {len(trace['traceEvents'])} events"]


def test_what_a_reader_misses_fails_the_check(series, monkeypatch, capsys):
    monkeypatch.setitem(check_traces.READERS, "hta", Fewer())
    assert check_traces.main([str(series[0]), "--reader", "hta"]) == 1
    assert "found none of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reader", "module"),
    [("plugin", "torch_tb_profiler"), ("hta", "hta"), ("perfetto", "perfetto")],
)
def test_readers_find_all_events_where_they_are_installed(series, capsys, reader, module):
    installed = importlib.util.find_spec(module) is not None
    status = check_traces.main([str(series[0]), "--reader", reader])
    if status == 2:  # not there, or (perfetto) without the network that it needs
        assert "pip install" in capsys.readouterr().err
        assert not installed or reader == "perfetto"
    else:
        assert status == 0 and installed, capsys.readouterr().out


@pytest.mark.parametrize("place", ["nothing", "."])
def test_no_traces_is_not_a_pass(tmp_path, capsys, place):
    assert check_traces.main([str(tmp_path / place)]) == 2
    assert "run profiling_script.py first" in capsys.readouterr().err


# --- what is missing ---


@pytest.mark.parametrize(
    ("package", "how"), [("torch", "pip install torch"), ("opacus", "pip install -e ../..")]
)
def test_a_missing_package_is_named(tmp_path, package, how):
    """``ModuleNotFoundError: No module named 'torch'`` and ``Opacus not available``."""
    done = run(
        SCRIPT, "--mode=test", "--output-dir", tmp_path / "runs", **missing(tmp_path, package)
    )
    assert done.returncode == 2
    assert f"the package {package} cannot be imported" in done.stderr and how in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    done = run(SYNTAX, **missing(tmp_path, package))
    assert done.returncode == 1 and done.stderr.startswith(package)


def test_without_tensorboard_and_matplotlib_it_still_runs(tmp_path):
    missing(tmp_path, "tensorboard")
    env = missing(tmp_path, "matplotlib")
    arguments = ("--mode=test", "--trainers", "StandardTrainer", *SMALL)
    done = run(SCRIPT, *arguments, "--output-dir", tmp_path / "runs", **env)
    assert done.returncode == 0, done.stderr
    assert "pip install tensorboard" in done.stderr
    assert (tmp_path / "runs" / "report.md").exists()
    assert not (tmp_path / "runs" / "memory.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode=fast",), "invalid choice: 'fast'"),
        ((), "--mode"),
        (("--mode=test", "--trainers", "Trainer"), "invalid choice"),
        (("--mode=test", "--seq-lengths", 513), "[513]: must be from 2 to 512"),
        (("--mode=test", "--batch-sizes", 0), "at least 1"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(
            profiling_script.main([*map(str, arguments), "--output-dir", str(tmp_path / "runs")])
        )
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def test_a_full_disk_keeps_the_earlier_result(tmp_path, monkeypatch, capsys):
    place = tmp_path / "StandardTrainer_B2_T16"
    place.mkdir()
    (place / "result.json").write_text('{"status": "earlier"}')

    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recording, "_profile", lambda *args: full(None))
    arguments = ["--mode=test", "--trainers", "StandardTrainer", "--batch-sizes", "2"]
    arguments += ["--seq-lengths", "16", "--output-dir", str(tmp_path)]
    status = profiling_script.main(arguments)
    assert status == 1 and "No space left" in capsys.readouterr().err
    assert json.loads((place / "result.json").read_text()) == {"status": "earlier"}
    assert json.loads((place / "result.failure.json").read_text())["kind"] == "storage"
    monkeypatch.setattr(Path, "write_bytes", full)  # now the failure cannot be recorded either
    assert profiling_script.main(arguments) == 1
    assert "could not be recorded" in capsys.readouterr().err
    assert json.loads((place / "result.json").read_text()) == {"status": "earlier"}


# --- test_syntax.py, run_profiling.sh, the README ---


def test_the_installation_is_in_order():
    done = run(SYNTAX)
    assert done.returncode == 0, done.stderr
    assert "are in order" in done.stdout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("model.py", "def broken(:\n", "model.py: line 1"),
        (
            "kernel_kinds.py",
            "def kind_of(): ...\n",
            "kernel_kinds.py: does not define kernels_of, summary",
        ),
        ("traces.py", None, "traces.py: No such file"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, message):
    for path in FOLDER.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    done = run(tmp_path / "test_syntax.py")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_the_check_knows_every_file():
    expected = next(
        ast.literal_eval(node.value)
        for node in ast.parse(SYNTAX.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "EXPECTED"
    )
    assert set(expected) == {p.name for p in FOLDER.glob("*.py")} - {SYNTAX.name}


@pytest.mark.slow
def test_the_shell_script_profiles_and_checks(tmp_path):
    out = tmp_path / "runs"
    arguments = ("--trainers", "StandardTrainer", *SMALL)
    done = run(SHELL, *arguments, MODE="test", OUT=str(out))
    assert done.returncode == 0, done.stderr
    assert "1 traces PASSED" in done.stdout and (out / "report.md").exists()
    done = run(SHELL, "--trainers", "nobody", MODE="test", OUT=str(out))
    assert done.returncode == 2


def test_the_readme_names_every_option(capsys):
    text = (FOLDER / "README.md").read_text()
    with pytest.raises(SystemExit):
        profiling_script.parse(["--help"])
    shown = capsys.readouterr().out
    options = {word.strip(",[]") for word in shown.split() if word.startswith(("--", "[--"))}
    assert len(options) > 10
    assert not [o for o in options - {"--help"} if o not in text]
    for path in FOLDER.iterdir():
        if path.suffix in (".py", ".sh", ".txt"):
            assert path.name in text, path.name


@pytest.mark.slow
def test_the_whole_test_mode_takes_less_than_a_minute(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    options = ("--mode=test", "--output-dir", tmp_path / "runs")
    done = run(SCRIPT, *options, timeout=550, python=sys.executable)
    assert done.returncode == 0, done.stderr
    assert len(find_traces(tmp_path / "runs")) == 12
    for name in TRAINERS:
        for batch in (2, 4):
            for length in (256, 512):
                assert f"{name:<22} B={batch} T={length}:" in done.stdout
    # Of one core: a busy machine takes longer by the clock.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 120
