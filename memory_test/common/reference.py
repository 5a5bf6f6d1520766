"""The same measurement with another ``opacus``, such as the original, in the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_test.common.failures import UsageError
from memory_test.common.launch import REPORTS_VARIABLE, STORE_VARIABLE, Runtime

SCRIPT = Path(__file__).resolve().parents[1] / "fsdp_llama3_profiling" / "single_experiment.py"


def check_folder(folder: Path) -> None:
    """Raise a :class:`UsageError` unless ``folder`` holds a package ``opacus``."""
    if not (folder / "opacus" / "__init__.py").is_file():
        raise UsageError(
            f"--reference {folder}: no opacus in it; make it with "
            f"pip install --target {folder} --no-deps opacus==1.6.0"
        )


def measure_with(
    folder: Path, arguments: list[str], runtime: Runtime, script: Path = SCRIPT
) -> dict[str, Any]:
    """Measure with the ``opacus`` in ``folder``; a collective call.

    A process of its own beside each rank runs ``script``; they form a process group of their
    own.

    Args:
        folder: Folder that is put on ``PYTHONPATH``.
        arguments: Of the script.
        runtime: This process.
        script: Takes ``--output`` and imports ``opacus`` as ``PYTHONPATH`` says.

    Returns:
        The result, on rank 0; nothing elsewhere, or if it failed, which is said.
    """
    import torch.distributed as dist

    place = [tempfile.mkdtemp(prefix="memory_test_") if runtime.is_main else ""]
    dist.broadcast_object_list(place, src=0, device=runtime.device)
    output = Path(place[0], "result.json")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OPACUS_", "TORCHELASTIC"))}
    env.pop(REPORTS_VARIABLE, None)
    env |= {
        "PYTHONPATH": str(folder),
        "RANK": str(runtime.rank),
        "WORLD_SIZE": str(runtime.world_size),
        STORE_VARIABLE: f"{place[0]}/store",
    }
    command = [sys.executable, str(script), *arguments, "--output", str(output)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    runtime.barrier()
    if not runtime.is_main:
        return {}
    if not output.is_file():
        print(f"  the reference in {folder} failed:\n{done.stderr[-6000:]}")
        return {}
    return json.loads(output.read_text())
