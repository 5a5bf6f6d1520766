"""Runs a script of memory_test as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMORY_TEST = ROOT / "memory_test"
PROFILING = MEMORY_TEST / "fsdp_llama3_profiling"
FLASH = MEMORY_TEST / "flash_fsdp_tests"
STARTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


def run(script: Path, *arguments: object, timeout: float = 120, **env: str):
    """The finished process, with its output as text."""
    command = [str(script)] if script.suffix == ".sh" else [sys.executable, str(script)]
    variables = {k: v for k, v in os.environ.items() if k not in STARTED}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **env}
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=script.parent,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
