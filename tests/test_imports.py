"""Importing the package is silent and quick, and imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.imports import back_arrows, circles, graph_of, imports_in

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "opacus"

# What each part may import from the package; a part may always import itself.
ALLOWED = {
    "core": set(),
    "losses": {"core"},
    "accountants": set(),
    "auditing": {"accountants"},
    "__main__": {"planning"},
    "version": set(),
    "layers": {"core", "utils"},
    "validators": {"core", "layers", "utils"},
    "schedulers": set(),
    "distributed": set(),
    "data": {"core", "utils"},
    "data_loader": {"data", "utils"},
    "utils": {"core", "data", "layers", "grad_sample", "optimizers", "privacy_engine"},
    "grad_sample": {"core", "layers", "utils"},
    "optimizers": {"accountants", "core"},
    "checkpoints": {"core", "data", "distributed", "grad_sample", "optimizers", "utils"},
    "distributed_checkpoint": {"checkpoints"},
    "engine_accounting": {"accountants"},
    "planning": {"accountants", "core"},
    "engine_settings": {"accountants", "core", "planning"},
    "engine_checks": {"core", "distributed", "engine_settings", "grad_sample", "optimizers"},
    "engine_sampling": {"accountants", "core", "data", "engine_settings"},
    "engine_budget": {"accountants", "data", "engine_checks", "engine_sampling"},
    "engine_checkpoints": {
        *("checkpoints", "core", "engine_accounting", "optimizers", "schedulers"),
    },
    "isolation": {"core", "grad_sample"},
    "lightning": {"data_loader"},
    "memory_curve": {"core"},
}
# Only the top imports the engine.
ON_TOP = {
    "privacy_engine", "engine_steps", "checkpoints/sharded", "__init__", "utils/adaptive_clipping", "integrations"
}  # fmt: skip


def imports_of(path: Path) -> set[str]:
    """Parts of the package that a file imports, ``core`` for ``opacus.core.rules``."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    names = (f"{base}.{name}".split(".") for base, name in imports_in(path, module))
    return {parts[1] for parts in names if parts[0] == "opacus" and parts[1:2] not in ([], [""])}


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


def test_no_files_import_each_other() -> None:
    """Imports for types alone and inside functions count, too."""
    graph = graph_of(PACKAGE)
    assert len(graph) > 100 and sum(map(len, graph.values())) > 300
    assert circles(graph) == []


def write(root: Path, **files: str) -> Path:
    for name, text in {"__init__": "", **files}.items():
        path = root / "p" / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "p"


@pytest.mark.parametrize(
    "closing",
    [
        "from p.a import X",
        "from p import a",
        "import p.a",
        "from . import a",
        "from .a import X",
        "def f():\n    from p.a import X",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import X",
    ],
)
def test_a_circle_is_found(tmp_path: Path, closing: str) -> None:
    package = write(tmp_path, a="from p import b", b="import p.c", c="import torch", d="import p.a")
    assert circles(graph_of(package)) == []
    package = write(tmp_path, c=closing)
    assert circles(graph_of(package)) == [["p.a", "p.b", "p.c"]]


def test_a_back_arrow_is_found(tmp_path: Path) -> None:
    files = {"low__x": "", "left__x": "from p.low import x", "right__x": "import p.low.x"}
    package = write(tmp_path, **files, top__x="import p.left.x", top__y="import p.top.x")
    parts = ["low", "left,right", "top"]
    assert back_arrows(graph_of(package), "p", parts) == []
    with pytest.raises(ValueError, match="right"):
        back_arrows(graph_of(package), "p", ["low", "left", "top"])
    write(tmp_path, low__x="def f():\n    import p.top.x", right__x="from p.left.x import y")
    arrows = back_arrows(graph_of(package), "p", parts)
    assert arrows == [("p.low.x", "p.top.x"), ("p.right.x", "p.left.x")]


# The rooms of the core, from the ground up; rules and privacy stand beside each other.
ROOMS = [
    "platform",
    "kernels",
    "rules,privacy",
    "record",
    "norms",
    "sums",
    "ranks",
    "isolation",
    "step",
]


def test_rooms_of_the_core_import_those_below_alone() -> None:
    graph = graph_of(PACKAGE / "core")
    assert len(graph) > 50
    assert back_arrows(graph, "opacus.core", ROOMS) == []


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
        "import time, torch; t = time.process_time(); import opacus; print(time.process_time() - t)"
    )
    assert any(float(run(code)) < 1.5 for _ in range(3))


def test_accountants_need_no_torch() -> None:
    for path in (PACKAGE / "accountants").rglob("*.py"):
        assert "import torch" not in path.read_text(), path
