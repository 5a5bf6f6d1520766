from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import opacus.accountants
from opacus.accountants import (
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
    register_accountant,
    registry,
)

PACKAGE = Path(opacus.accountants.__file__).parent


class Other(RDPAccountant):
    pass


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))


def test_known_names() -> None:
    assert type(create_accountant("rdp")) is RDPAccountant
    assert type(create_accountant("prv")) is PRVAccountant
    with pytest.warns(UserWarning, match="GDP"):
        assert create_accountant("gdp").mechanism() == "gdp"


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"'rpd'.*prv.*rdp"):
        create_accountant("rpd")


def test_registration() -> None:
    register_accountant("mine", Other)
    assert type(create_accountant("mine")) is Other
    with pytest.raises(ValueError, match="force"):
        register_accountant("rdp", Other)
    assert type(create_accountant("rdp")) is RDPAccountant
    register_accountant("rdp", Other, force=True)
    assert type(create_accountant("rdp")) is Other


def test_interface_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        IAccountant()  # type: ignore[abstract]


def test_two_methods_make_an_accountant() -> None:
    class Counter(IAccountant):
        def get_epsilon(self, delta: float) -> float:  # type: ignore[override]
            return float(len(self))

        @classmethod
        def mechanism(cls) -> str:
            return "counter"

    counter = Counter()
    counter.step(noise_multiplier=1.0, sample_rate=0.1)
    counter.step(noise_multiplier=2.0, sample_rate=0.1)
    assert counter.get_epsilon(1e-5) == 2.0
    assert counter.state_dict()["mechanism"] == "counter"


def test_no_file_imports_torch() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "torch" for name in names), file


def test_importing_loads_neither_torch_nor_scipy() -> None:
    code = f"""
import sys, types
package = types.ModuleType("opacus")  # without opacus/__init__.py, which needs torch
package.__path__ = [{str(PACKAGE.parent)!r}]
sys.modules["opacus"] = package
import opacus.accountants
print([name for name in ("torch", "scipy") if name in sys.modules])
print(opacus.accountants.analysis.prv.Domain, opacus.accountants.analysis.gdp.eps_from_mu)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[]\n")
    assert done.stderr == ""
