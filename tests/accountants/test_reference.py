"""Agreement with other libraries: a table of their values, and Opacus itself if it is there.

Set OPACUS_REFERENCE to a folder that holds Opacus 1.6.0 (`pip install --target`) to run the tests
that start it in a process of its own. `reference.py` made the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opacus.accountants import IAccountant, create_accountant

FOLDER = Path(__file__).parent
TABLE: dict[str, Any] = json.loads((FOLDER / "reference.json").read_text())
CASES = [dict(zip(TABLE["columns"], row, strict=True)) for row in TABLE["rows"]]
# Large epsilons need large grids, about a second each.
QUICK = [case for case in CASES if case["rdp"] < 60.0 and case["steps"] < 20_000]

pytestmark = pytest.mark.filterwarnings("ignore:The .* Renyi order")
needs_opacus = pytest.mark.skipif(
    "OPACUS_REFERENCE" not in os.environ, reason="OPACUS_REFERENCE is not set"
)


def book(mechanism: str, case: dict[str, Any]) -> IAccountant:
    accountant = create_accountant(mechanism)
    accountant.history = [(case["noise_multiplier"], case["sample_rate"], case["steps"])]
    return accountant


def check_against_opacus(mechanism: str, case: dict[str, Any]) -> None:
    epsilon = book(mechanism, case).get_epsilon(case["delta"])
    assert epsilon == pytest.approx(case[mechanism], rel=0.01), case


def check_against_pld(case: dict[str, Any]) -> None:
    """The distribution of dp-accounting is pessimistic too: each step rounds losses up."""
    eps_error = max(5e-4, min(0.01, 0.005 * case["pld"]))
    epsilon = book("prv", case).get_epsilon(case["delta"], eps_error=eps_error)
    assert epsilon == pytest.approx(case["pld"], rel=0.02, abs=1e-3), case


def test_table_covers_the_grid() -> None:
    assert len(CASES) == 360
    assert len(QUICK) > 200
    for name, least in (("rdp", 360), ("prv", 335), ("pld", 340)):
        assert sum(case[name] is not None for case in CASES) >= least


def test_rdp_against_opacus() -> None:
    for case in CASES:
        check_against_opacus("rdp", case)


def test_prv_against_opacus() -> None:
    for case in QUICK:
        check_against_opacus("prv", case)


def test_prv_against_pld() -> None:
    for case in QUICK:
        if case["pld"] is not None:
            check_against_pld(case)


@pytest.mark.slow
def test_prv_against_large_values() -> None:
    for case in [case for case in CASES if case not in QUICK and case["delta"] == 1e-5]:
        if case["prv"] is not None:
            check_against_opacus("prv", case)
        if case["pld"] is not None and case["pld"] < 100.0:
            check_against_pld(case)
        assert book("prv", case).get_epsilon(case["delta"]) <= case["rdp"] * (1 + 1e-9)


def run_opacus(code_or_file: list[str], stdin: str) -> Any:
    place = os.environ["OPACUS_REFERENCE"]
    done = subprocess.run(
        [sys.executable, *code_or_file],
        input=stdin,
        env={**os.environ, "PYTHONPATH": place},
        cwd=place,  # `python -c` looks for modules here first
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@needs_opacus
def test_opacus_itself() -> None:
    """Settings that are not in the table."""
    settings = [(0.9, 0.02, 700, 2e-6), (1.7, 0.25, 40, 1e-4), (3.3, 0.004, 9000, 3e-7)]
    names = TABLE["columns"][:4]
    cases = [dict(zip(names, setting, strict=True)) for setting in settings]
    script = str(FOLDER / "reference.py")
    for case in run_opacus([script, "opacus"], json.dumps(cases)):
        check_against_opacus("rdp", case)
        check_against_opacus("prv", case)


EXCHANGE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from opacus.accountants import create_accountant
state = json.load(sys.stdin)
state["history"] = [tuple(entry) for entry in state["history"]]
accountant = create_accountant(state["mechanism"])
accountant.load_state_dict(state)
accountant.step(noise_multiplier=2.0, sample_rate=0.1)
json.dump(accountant.state_dict(), sys.stdout)
"""


@needs_opacus
@pytest.mark.filterwarnings("ignore:The GDP accountant")
@pytest.mark.parametrize("mechanism", ["rdp", "prv", "gdp"])
def test_state_goes_to_opacus_and_back(mechanism: str) -> None:
    accountant = create_accountant(mechanism)
    accountant.history = [(2.0, 0.1, 3)]
    returned = run_opacus(["-c", EXCHANGE], json.dumps(accountant.state_dict()))
    accountant.load_state_dict(returned)
    assert accountant.history == [(2.0, 0.1, 4)]
