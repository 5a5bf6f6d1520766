"""Without a GPU the kernels' tests run in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted(
    str(p.relative_to(HERE)) for p in HERE.rglob("test_triton_*.py") if p != Path(__file__)
)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_kernels_in_the_interpreter() -> None:
    assert len(FILES) > 6
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(
        [*command, "-rA", *FILES],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    for name in FILES:
        assert f"{name}::" in result.stdout, f"nothing of {name} ran"
