"""Runs the worker once with this package and once with Opacus 1.6.0."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.reference.installed import opacus_folder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIME_LIMIT = 280
Results = dict[str, tuple[Any, Any]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What both packages gave: ``{scenario: (ours, theirs)}``.

    The keys ``(scenario, "loaded")`` hold what each gave on the other's states.
    """
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reference"
    ours, theirs = place / "ours", place / "theirs"
    with FileLock(f"{place}.lock"):  # one process of pytest-xdist runs them for all
        if not (theirs / "loaded.pt").exists():
            packages = {ours: ROOT, theirs: opacus_folder()}
            for folder in packages:
                folder.mkdir(parents=True, exist_ok=True)
            _run([(package, [folder]) for folder, package in packages.items()])
            _run([(packages[ours], [ours, theirs]), (packages[theirs], [theirs, ours])])
    own, reference = _load(ours), _load(theirs)
    return {name: (own[name], reference[name]) for name in own.keys() | reference.keys()}


def _run(jobs: list[tuple[Path, list[Path]]]) -> None:
    """Run the worker for each package, side by side."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for package, arguments in jobs
    ]
    for process in processes:
        _, errors = process.communicate(timeout=TIME_LIMIT)
        assert process.returncode == 0, errors


def _load(folder: Path) -> dict[Any, Any]:
    loaded = torch.load(folder / "loaded.pt")
    return torch.load(folder / "results.pt") | {(n, "loaded"): v for n, v in loaded.items()}


@pytest.fixture
def both(results: Results) -> Callable[[Any], tuple[Any, Any]]:
    """The results of one scenario, ``(ours, theirs)``; fails if either raised."""

    def get(name: Any) -> tuple[Any, Any]:
        for package, result in zip(("this package", "Opacus"), results[name], strict=True):
            assert not isinstance(result, str), f"{package} failed: {result}"
        return results[name]

    return get
