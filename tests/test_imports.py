"""Importing the package is silent and quick, and imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "opacus"

# What each part may import from the package; a part may always import itself.
ALLOWED = {
    "core": set(),
    "accountants": set(),
    "version": set(),
    "layers": {"core", "utils"},
    "validators": {"core", "layers", "utils"},
    "schedulers": set(),
    "distributed": set(),
    "data_loader": {"core", "utils"},
    "utils": {"core", "data_loader", "layers", "grad_sample", "optimizers", "privacy_engine"},
    "grad_sample": {"core", "layers", "utils"},
    "optimizers": {"core"},
    "checkpoint": {"core", "grad_sample", "optimizers", "utils"},
    "engine_checks": {"core", "distributed", "grad_sample", "optimizers"},
    "lightning": {"data_loader"},
    "scale": {"core"},
}
# Only the top imports the engine.
ON_TOP = {"privacy_engine", "distributed_checkpoint", "__init__", "utils/adaptive_clipping"}


def imports_of(path: Path) -> set[str]:
    """Parts of the package that a file imports, ``core`` for ``opacus.core.rules``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "opacus" and len(parts) > 1:
                found.add(parts[1])
    return found


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(PACKAGE).with_suffix("")
    part = relative.parts[0]
    imported = imports_of(path) - {part}
    if any(str(relative).startswith(top) for top in ON_TOP):
        return
    assert imported <= ALLOWED[part], f"{relative} may not import {imported - ALLOWED[part]}"
    assert "privacy_engine" not in imported or part == "utils"


def test_core_imports_torch_alone() -> None:
    standard = sys.stdlib_module_names
    for path in (PACKAGE / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots = {(node.module or "").split(".")[0]}
            else:
                continue
            assert roots <= {"torch", "opacus", "triton"} | set(standard), f"{path}: {roots}"


def run(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_is_silent_and_installs_no_handler() -> None:
    code = (
        "import logging; before = list(logging.root.handlers); import opacus;"
        "assert logging.root.handlers == before;"
        "assert all(not l.disabled for n, l in logging.root.manager.loggerDict.items()"
        " if n.startswith('opacus') and isinstance(l, logging.Logger))"
    )
    assert run(code, "-W", "error") == ""


def test_import_costs_little_more_than_torch() -> None:
    code = (
        "import time, torch; t = time.perf_counter(); import opacus; print(time.perf_counter() - t)"
    )
    assert min(float(run(code)) for _ in range(3)) < 1.5


def test_accountants_need_no_torch() -> None:
    for path in (PACKAGE / "accountants").rglob("*.py"):
        assert "import torch" not in path.read_text(), path
