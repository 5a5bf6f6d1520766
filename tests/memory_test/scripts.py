"""Runs a script of memory_test: as a user would, or without waiting for an interpreter to start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.helpers.distributed import preload
from tests.helpers.scripts import run_script
from tests.helpers.warm_python import warm_python

preload("transformers.models.llama.modeling_llama", "torch.utils.tensorboard", "matplotlib.pyplot")

ROOT = Path(__file__).resolve().parents[2]
MEMORY_TEST = ROOT / "memory_test"
PROFILING = MEMORY_TEST / "fsdp_llama3_profiling"
FLASH = MEMORY_TEST / "flash_fsdp_tests"
STARTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


def run(
    script: Path, *arguments: object, timeout: float = 300, python: str | None = None, **env: str
):
    """The finished process, with its output as text.

    With `python=sys.executable` interpreters start as a user's do; else they have started already.
    """
    python = env["PYTHON"] = python or warm_python()
    command = [str(script)] if script.suffix == ".sh" else [python, str(script)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=script.parent,
        env=variables(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def forked(script: Path, *arguments: object, ranks: int = 0, timeout: float = 300, **env: str):
    """The same in a forked process; with `ranks`, in those that the script would have started."""
    return run_script(
        script,
        *arguments,
        folder=script.parent,
        ranks=ranks,
        timeout=timeout,
        env=variables(env),
    )


def variables(more: dict[str, str]) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k not in STARTED}
    return own | {"OMP_NUM_THREADS": "1", **more}
