"""Test modules share through helpers: none imports another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MODULES = sorted(TESTS.rglob("*.py"))


def imported(text: str) -> set[str]:
    """Modules, and names that may be modules, by their whole names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def of_tests(names: set[str]) -> list[str]:
    """Those that pytest collects."""
    own = (name for name in names if name.startswith(("tests.", ".")))
    return sorted(n for n in own if any(part.startswith("test_") for part in n.split(".")[-2:]))


@pytest.mark.parametrize(
    "text",
    [
        "from tests.engine.test_units import Net",
        "from tests.engine import test_units",
        "import tests.engine.test_units as units",
        "def late():\n    from .test_units import Net",
    ],
)
def test_an_import_is_found(text: str) -> None:
    assert of_tests(imported(text))


def test_no_test_module_imports_another() -> None:
    assert len(MODULES) > 150
    found = {
        str(path.relative_to(TESTS)): wrong
        for path in MODULES
        if (wrong := of_tests(imported(path.read_text(encoding="utf-8"))))
    }
    assert not found, "move what is shared to tests/helpers"
