"""The digits on two processes, once started by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import ddp_digits as script

from tests.helpers.distributed import preload
from tests.helpers.scripts import run_script
from tests.helpers.warm_python import warm_python

preload("sklearn.datasets")

ROOT = Path(__file__).parents[2]


def torchrun(*options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "examples/ddp_digits.py", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm_python()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_what_the_docstring_promises(mode):
    options = ("--seed", "0", "--device", "cpu", "--grad-sample-mode", mode)
    if mode == "hooks":
        out = torchrun(*options)
    else:
        done = run_script(ROOT / "examples/ddp_digits.py", *options, folder=ROOT, ranks=2)
        assert done.returncode == 0, done.stderr
        out = done.stdout
    assert out.count("at epsilon") == 1  # one process speaks
    accuracy, epsilon = re.search(r"accuracy ([\d.]+)% at epsilon ([\d.]+)", out).groups()
    assert float(accuracy) > 87
    assert 2.9 < float(epsilon) <= 3.0


def test_a_group_of_one():
    outcome = script.main(["--epochs", "2", "--seed", "0"])
    assert 2.5 < outcome.epsilon <= 3.0
    assert outcome.accuracy > 0.2
