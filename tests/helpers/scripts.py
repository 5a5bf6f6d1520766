"""Runs scripts in processes that are forked from the server of ranks: no interpreter has to start.

Such a script is `__main__`, with its folder first on the path, arguments, variables and output of
its own; the interpreters that it starts are forked, too (`warm_python`). What starts with an
interpreter is not tested so: imports under ``-W error``, packages that are missing. Some tests run
those.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from tests.helpers import distributed as ranks_
from tests.helpers.warm_python import ended, warm_python


def run_script(
    script: Path,
    *arguments: object,
    folder: Path,
    ranks: int = 0,
    path: Sequence[Path] = (),
    strict: bool = False,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The script's end.

    Args:
        script: Run as `__main__`.
        *arguments: Of its command line.
        folder: Where it runs.
        ranks: Processes that are told what torchrun tells its own; 0 for one that is told nothing.
        path: Folders on its path besides its own.
        strict: Warnings are errors, but for those of the server's imports.
        timeout: Seconds.
        env: Its variables; left out, those of the caller.

    Returns:
        The output of all ranks, one after the other, and the first exit status that is not 0.

    Raises:
        subprocess.TimeoutExpired: Some rank had not ended; all have been killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ranks_.PRELOADED)
    variables = dict(os.environ if env is None else env)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
    with tempfile.TemporaryDirectory(prefix="opacus_script_") as outputs:
        processes = []
        for rank in range(max(1, ranks)):
            own = {} if store is None else _told(rank, ranks, store.port)
            options = (str(script), [*map(str, arguments)], str(folder), [*map(str, path)], strict)
            output = (f"{outputs}/out{rank}", f"{outputs}/err{rank}")
            target = (warm_python(), variables | own, output, *options)
            processes.append(context.Process(target=_main, args=target))
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        late = any(process.is_alive() for process in processes)
        ranks_._end(processes)
        out, err = (
            "".join(p.read_text() for p in sorted(Path(outputs).glob(f"{name}*")))
            for name in ("out", "err")
        )
    if late:
        raise subprocess.TimeoutExpired(str(script), timeout, out, err)
    status = next((p.exitcode for p in processes if p.exitcode), 0)
    return subprocess.CompletedProcess([str(script), *map(str, arguments)], status, out, err)


def _told(rank: int, world_size: int, port: int) -> dict[str, str]:
    """As torchrun does, which keeps the store itself: no port is free, and then taken."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _main(
    python: str,
    environment: dict[str, str],
    output: tuple[str, str],
    script: str,
    arguments: list[str],
    folder: str,
    path: list[str],
    strict: bool,
) -> None:
    for fd, place in zip((1, 2), output, strict=True):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable, sys.argv = python, [script, *arguments]
    sys.path[:0] = [str(Path(script).resolve().parent), *path]
    if strict:
        warnings.simplefilter("error")
    sys.exit(ended(lambda: runpy.run_path(script, run_name="__main__")))
