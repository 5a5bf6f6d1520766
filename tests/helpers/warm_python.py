"""A `python` that has started already: what it runs is forked from the server of ranks.

    subprocess.run([warm_python(), "script.py", "--option"])

For scripts that start interpreters themselves (ranks, a series of runs, torchrun): in one that runs
so, `sys.executable` is this command again, and nobody imports torch a second time. It takes `-c`,
`-m` or a script, with the variables, folder, standard streams and signals of who calls it; if its
caller is killed, so is what it runs. Who asks for more, by another option or a PYTHONPATH that may
hold other packages, gets an interpreter that starts. Variables that torch reads when it is imported
have been read.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import marshal
import multiprocessing
import os
import runpy
import select
import signal
import socket
import stat
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.helpers import distributed as ranks_

ROOT = Path(__file__).parents[2]
# The command: hands over what it was told, waits, and ends as that ended.
CLIENT = """#!{python} -IS
import os, sys
words = [word for word in sys.argv[1:3] if word not in ("-u", "-B")]
known = words and (words[0] in ("-c", "-m") or words[0][:1] != "-")
if not known or os.environ.get("PYTHONPATH") not in {paths!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import marshal, signal, socket
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
request = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ)))
socket.send_fds(link, [len(request).to_bytes(8, "big")], [0, 1, 2])
link.sendall(request)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
    signal.signal(number, lambda number, frame: link.send(bytes([number])))
status = int.from_bytes(link.recv(4), "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python() -> str:
    """The path of the command; the server behind it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="opacus_python_"))
    command, address = folder / "python", str(folder / "socket")
    paths = (None, "", str(ROOT), os.environ.get("PYTHONPATH"))
    command.write_text(CLIENT.format(python=sys.executable, address=address, paths=paths))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ranks_.PRELOADED)
    server = context.Process(target=_serve, args=(listener, str(command)))
    server.start()
    listener.close()
    atexit.register(_end, server, folder)
    return str(command)


def _end(server: Any, folder: Path) -> None:
    server.kill()
    server.join()
    for path in (folder / "python", folder / "socket"):
        path.unlink(missing_ok=True)
    folder.rmdir()


def _serve(listener: socket.socket, command: str) -> None:
    """Forks a keeper for each caller; ends if the process that wants it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are waited for by nobody
    while True:
        ready = select.select([listener, parent.sentinel], [], [])[0]
        if parent.sentinel in ready:
            os._exit(0)
        link = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(link, command)
        link.close()


def _keep(link: socket.socket, command: str) -> None:
    """Forks what the caller wants run; passes signals on to it, and to the caller how it ended."""
    size, streams, _, _ = socket.recv_fds(link, 8, 3)
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += link.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        link.close()
        _become(command, streams, *marshal.loads(request))
    for stream in [0, 1, 2, *streams]:
        os.close(stream)
    ended = os.pidfd_open(pid)
    while ended not in (ready := select.select([link, ended], [], [])[0]):
        assert ready == [link]
        number = link.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # the caller was killed meanwhile
        link.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(
    command: str, streams: array.array[int], arguments: list[str], folder: str, variables: Any
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put nothing in its place
    sys.executable = command
    os._exit(ended(functools.partial(_run, arguments)))


def _run(arguments: list[str]) -> None:
    while arguments[0] in ("-u", "-B"):
        del arguments[0]
    kind, *rest = arguments
    if kind == "-c":
        main = ModuleType("__main__")
        sys.argv, sys.modules["__main__"] = ["-c", *rest[1:]], main
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def ended(run: Any) -> int:
    """The exit status that an interpreter which calls `run` would have."""
    gc.freeze()  # what the server imported stays, and is shared with it
    torch.set_num_threads(1)
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
