"""Agreement with a table of other libraries' values, which `reference.py` made.

`tests/reference` runs Opacus itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from opacus.accountants import IAccountant, RDPAccountant, create_accountant
from tests.accountants.table import CASES, QUICK

pytestmark = pytest.mark.filterwarnings("ignore:The .* Renyi order")


def book(mechanism: str, case: dict[str, Any]) -> IAccountant:
    accountant = create_accountant(mechanism)
    accountant.history = [(case["noise_multiplier"], case["sample_rate"], case["steps"])]
    return accountant


def check_rdp_against_opacus(case: dict[str, Any]) -> None:
    """At Opacus' orders, its value; other orders are tried where the first or last is the best."""
    accountant = book("rdp", case)
    same_orders = accountant.get_epsilon(case["delta"], alphas=RDPAccountant.DEFAULT_ALPHAS)
    assert same_orders == pytest.approx(case["rdp"], rel=0.01), case
    epsilon = accountant.get_epsilon(case["delta"])
    assert epsilon <= same_orders, case
    assert epsilon >= 0.97 * (case["pld"] or 0.0) - 1e-3, case


def check_prv_against_opacus(case: dict[str, Any]) -> None:
    """Opacus' value, unless "rdp", which bounds ours, now gives less.

    Ours is the larger of both directions. Opacus counts removing alone, which is the larger one but
    for a small part of `eps_error`, 0.01, where epsilon is that error and nothing else.
    """
    epsilon = book("prv", case).get_epsilon(case["delta"])
    if epsilon < book("rdp", case).get_epsilon(case["delta"]):
        assert epsilon == pytest.approx(case["prv"], rel=0.01, abs=1e-3), case
    else:
        assert (case["pld"] or 0.0) * 0.97 - 1e-3 <= epsilon <= 1.01 * case["prv"], case


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
        check_rdp_against_opacus(case)


def test_prv_against_opacus() -> None:
    for case in QUICK:
        check_prv_against_opacus(case)


def test_prv_against_pld() -> None:
    for case in QUICK:
        if case["pld"] is not None:
            check_against_pld(case)


@pytest.mark.slow
def test_prv_against_large_values() -> None:
    for case in [case for case in CASES if case not in QUICK and case["delta"] == 1e-5]:
        if case["prv"] is not None:
            check_prv_against_opacus(case)
        if case["pld"] is not None and case["pld"] < 100.0:
            check_against_pld(case)
        assert book("prv", case).get_epsilon(case["delta"]) <= case["rdp"] * (1 + 1e-9)
