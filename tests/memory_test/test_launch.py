"""Processes that hang, are killed, fail or cannot be started are told apart."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from memory_test.common.failures import StorageError, UsageError, describe, fail_if_planted
from memory_test.common.launch import count_processes, run_processes
from memory_test.common.results import failure_path, prepare_folder, write_json

MEMORY_TEST = Path(__file__).parents[2] / "memory_test"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time; " + code]


def test_all_processes_run_with_their_ranks(tmp_path):
    code = f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w')"
    assert run_processes(python(code), 3) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_hang_is_a_timeout_and_leaves_no_process(monkeypatch):
    started, start = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kw: started.append(start(*args, **kw)) or started[-1]
    )
    failure = run_processes(python("time.sleep(600)"), 2, timeout=0.5)
    assert failure is not None and failure.kind == "timeout" and failure.exit_code == 124
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_killed_process_is_reported_as_out_of_memory():
    failure = run_processes(
        python("os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else 0"), 2
    )
    assert failure is not None and failure.kind == "out_of_memory" and failure.rank == 1


def test_the_cause_is_reported_rather_than_its_consequences():
    report = "open(os.path.join(os.environ['MEMORY_TEST_REPORTS'], 'rank' + r + '.json'), 'w')"
    text = '{"kind": "%s", "error": "e", "rank": %s}'
    code = (
        f"r = os.environ['RANK']; kind = 'error' if r == '0' else 'out_of_memory'; "
        f"{report}.write({text!r} % (kind, r)); sys.exit(1)"
    )
    failure = run_processes(python(code), 2)
    assert failure is not None and (failure.kind, failure.rank) == ("out_of_memory", 1)


def test_a_failed_process_ends_the_others_that_wait_for_it(monkeypatch):
    monkeypatch.setattr("memory_test.common.launch.GRACE_SECONDS", 0.3)
    failure = run_processes(
        python("sys.exit(7) if os.environ['RANK'] == '0' else time.sleep(600)"), 2
    )
    assert failure is not None and failure.kind == "error" and "exit status 7" in failure.error


def test_a_missing_gpu_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="2 GPUs are needed, 0 found"):
        count_processes(2, "cuda", spread=True)
    assert count_processes(None, "auto", spread=True) == 2
    assert count_processes(None, "cpu", spread=False) == 1


def test_a_planted_oom_is_recognised(monkeypatch):
    monkeypatch.setenv("MEMORY_TEST_PLANT", "hang:other,oom:ghost")
    fail_if_planted("hooks", 0)
    with pytest.raises(RuntimeError) as caught:
        fail_if_planted("ghost", 0)
    assert describe(caught.value).kind == "out_of_memory"
    monkeypatch.setenv("MEMORY_TEST_PLANT", "fire")
    with pytest.raises(UsageError, match="oom or hang"):
        fail_if_planted("ghost", 0)


def test_kinds_of_failures():
    assert describe(torch.OutOfMemoryError("CUDA out of memory. Tried ...")).kind == "out_of_memory"
    assert describe(MemoryError()).exit_code == 3
    assert describe(OSError(errno.ENOSPC, "No space left on device")).kind == "storage"
    assert describe(UsageError("no")).exit_code == 2
    assert describe(KeyError("x")).exit_code == 1


def test_a_full_disk_keeps_the_earlier_result(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"old": 1})

    def full(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(StorageError, match="no space left on the device; the earlier file is kept"):
        write_json(path, {"new": 2})
    assert '"old": 1' in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_an_output_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        prepare_folder(tmp_path / "file" / "result.json")
    with pytest.raises(UsageError, match="is a folder"):
        prepare_folder(tmp_path)
    assert failure_path(tmp_path / "a.json").name == "a.failure.json"


def test_no_script_is_taken_for_a_package_that_transformers_looks_for():
    """The folder of a script that runs comes first where modules are looked for."""
    scripts = [p for p in MEMORY_TEST.glob("*/*.py") if not p.stem.startswith("__")]
    folders, names = sorted({str(p.parent) for p in scripts}), {p.stem for p in scripts}
    code = (
        f"import sys; sys.path[:0] = {folders}; import transformers; "
        f"transformers.LlamaConfig, transformers.LlamaForCausalLM; found = set(sys.modules); "
        f"print('taken:', sorted(found & {names}), 'in', len(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "taken: [] in" in done.stdout, done.stdout + done.stderr


def test_details_of_a_failure_end_with_what_caused_it():
    try:
        try:
            import_module("a_module_that_is_not_there")
        except ImportError as error:
            raise RuntimeError("no model") from error
    except RuntimeError as error:
        details = describe(error).details
    assert "RuntimeError: no model" in details
    assert details.rstrip().splitlines()[-1].startswith("caused by: ModuleNotFoundError: No module")
