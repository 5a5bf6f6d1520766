"""What is run by an interpreter that has started already ends, and is ended, like any other."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.warm_python import warm_python

SCRIPT = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["MINE"], __name__, "torch" in sys.modules)
print("an error", file=sys.stderr)
import beside
print(sys.stdin.read(), flush=True)
os.system("exit 3")
"""


def run(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]


def test_a_script_has_what_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("print('beside')")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    done = run(
        tmp_path / "script.py", "a", "b c", cwd=folder, env={"MINE": "is here"}, input="read"
    )
    assert done.returncode == 0, done.stderr
    told = f"['a', 'b c'] {folder} is here __main__ True"
    assert done.stdout.splitlines() == [told, "beside", "read"]
    assert done.stderr == "an error\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import atexit; atexit.register(print, 'late')", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_ends_as_its_code_ends(code: str, status: int, said: str) -> None:
    done = run("-c", code)
    assert done.returncode == status and said in done.stderr
    assert done.stdout == ("late\n" if "atexit" in code else "")


def test_modules_and_interpreters_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("import sys; print(sys.argv[1:], 'torch' in sys.modules)")
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'inner', 'x'])"
    assert run("-u", "-c", code, cwd=tmp_path).stdout == "['x'] True\n"
    assert sys.executable != warm_python()


@pytest.mark.parametrize(
    ("words", "path"), [((), "elsewhere"), (("-W", "error"), ""), (("-u", "-I"), "")]
)
def test_what_depends_on_the_start_of_an_interpreter_starts_one(
    words: tuple[str, ...], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    done = run(*words, "-c", "import sys; print('torch' in sys.modules, sys.executable)")
    assert done.stdout == f"False {sys.executable}\n", done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_caller(tmp_path: Path, how: signal.Signals) -> None:
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(250)"
    caller = subprocess.Popen([warm_python(), "-c", code])
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    assert caller.poll() is None
    caller.send_signal(how)
    assert caller.wait(60) == -how
    end = time.monotonic() + 60
    while Path("/proc", mark.read_text()).exists():
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.01)
