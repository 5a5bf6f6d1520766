from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest

from opacus.accountants import (
    IAccountant,
    RDPAccountant,
    create_accountant,
    register_accountant,
    registry,
)
from opacus.accountants.utils import MAX_SIGMA, get_noise_multiplier

BUDGET: dict[str, Any] = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.01}
ignore_gdp = pytest.mark.filterwarnings("ignore:The GDP accountant")


@ignore_gdp
@pytest.mark.filterwarnings("ignore:The .* Renyi order")
@pytest.mark.parametrize("accountant", ["rdp", "prv", "pld", "gdp"])
@pytest.mark.parametrize(
    "target, rate, steps",
    [
        (0.2, 0.01, 279),
        (1.0, 0.1, 50),
        (2.0, 0.3, 12),
        (2.0, 1 / 93, 279),
        (8.0, 0.0025, 40_000),
        (20.0, 0.1, 50),
        (200.0, 0.01, 20),
    ],
)
def test_budget_is_met_and_spent(accountant: str, target: float, rate: float, steps: int) -> None:
    sigma = get_noise_multiplier(
        target_epsilon=target,
        target_delta=1e-5,
        sample_rate=rate,
        steps=steps,
        accountant=accountant,
    )
    book = create_accountant(accountant)
    book.history = [(sigma, rate, steps)]
    epsilon = book.get_epsilon(1e-5)
    assert max(0.95 * target, target - 0.01) <= epsilon <= target


def test_tolerance() -> None:
    sigmas = [
        get_noise_multiplier(**BUDGET, steps=1000, epsilon_tolerance=tolerance)
        for tolerance in (1e-6, 1e-2, 10.0)
    ]
    assert sigmas[0] < sigmas[1] < sigmas[2]
    for sigma, least in zip(sigmas, (2.0 - 1e-6, 1.99, 1.9), strict=True):
        book = RDPAccountant()
        book.history = [(sigma, 0.01, 1000)]
        assert least <= book.get_epsilon(1e-5) <= 2.0


@pytest.mark.parametrize(
    "accountant, expected",
    [("rdp", 1.4160156), ("prv", 1.3476562), pytest.param("gdp", 1.3232422, marks=ignore_gdp)],
)
def test_same_value_as_opacus(accountant: str, expected: float) -> None:
    sigma = get_noise_multiplier(
        target_epsilon=8, target_delta=1e-5, sample_rate=0.04, epochs=90, accountant=accountant
    )
    assert sigma == pytest.approx(expected, abs=1e-6)


def test_epochs_become_whole_steps() -> None:
    assert math.floor(3 / (1 / 75)) == 224, "this case should be spoilt by rounding"
    arguments = {**BUDGET, "sample_rate": 1 / 75, "epsilon_tolerance": 1e-6}
    by_epochs = get_noise_multiplier(**arguments, epochs=3)
    assert by_epochs == get_noise_multiplier(**arguments, steps=225)
    assert by_epochs > get_noise_multiplier(**arguments, steps=224)


def test_arguments_reach_the_accountant() -> None:
    few = get_noise_multiplier(**BUDGET, steps=1000, alphas=[15.0, 20.0])
    assert few > get_noise_multiplier(**BUDGET, steps=1000)
    coarse = get_noise_multiplier(**BUDGET, steps=1000, accountant="prv", eps_error=0.5)
    assert coarse > get_noise_multiplier(**BUDGET, steps=1000, accountant="prv")


def test_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counting(RDPAccountant):
        def get_epsilon(self, delta: float, **kwargs: Any) -> float:  # type: ignore[override]
            calls.append(self.history[0][0])
            return super().get_epsilon(delta, **kwargs)

    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))
    register_accountant("counting", Counting)
    get_noise_multiplier(**BUDGET, steps=1000, accountant="counting")
    assert 0 < len(calls) < 25
    calls.clear()
    get_noise_multiplier(**BUDGET, steps=1000, accountant="counting", epsilon_tolerance=1e-300)
    assert 0 < len(calls) < 60


def test_gap_in_epsilon_gives_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Jump(RDPAccountant):
        def get_epsilon(self, delta: float, **kwargs: Any) -> float:  # type: ignore[override]
            return 1.0 if self.history[0][0] > math.pi else 5.0

    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))
    register_accountant("jump", Jump)
    sigma = get_noise_multiplier(**BUDGET, steps=1, accountant="jump")
    assert sigma > math.pi
    assert sigma == pytest.approx(math.pi, rel=1e-8)


def test_impossible_budget() -> None:
    impossible = {"target_epsilon": 1e-9, "target_delta": 1e-15, "sample_rate": 1.0}
    with pytest.raises(ValueError, match=r"too low.*'pld'"):
        get_noise_multiplier(**impossible, steps=10**7)
    for accountant in ("rdp", "prv", "pld"):
        sigma = get_noise_multiplier(
            **{**BUDGET, "target_epsilon": 0.05}, steps=1000, accountant=accountant
        )
        assert sigma <= MAX_SIGMA


CORNERS = [
    (0.01, 1e-15, 1.0, 10**7),
    (0.01, 1e-2, 1e-3, 100),
    (0.01, 1e-5, 1e-3, 10**7),
    (1.0, 1e-6, 1e-7, 10**7),
    (10.0, 1e-10, 1e-3, 10**6),
    (1000.0, 1e-5, 0.01, 10**7),
    (1000.0, 1e-15, 1e-7, 10**7),
    (1000.0, 1e-15, 1e-3, 1),
]


def found_in_seconds(
    accountant: str, target: float, delta: float, rate: float, steps: int
) -> tuple[float, IAccountant]:
    """The noise multiplier for a budget, and the accountant of such a run, which keeps it."""
    start = time.process_time()
    sigma = get_noise_multiplier(
        target_epsilon=target,
        target_delta=delta,
        sample_rate=rate,
        steps=steps,
        accountant=accountant,
    )
    assert time.process_time() - start < 20.0
    book = create_accountant(accountant)
    book.history = [(sigma, rate, steps)]
    assert book.get_epsilon(delta) <= target
    return sigma, book


@pytest.mark.parametrize("accountant", ["rdp", "prv", "pld"])
@pytest.mark.parametrize("target, delta, rate, steps", CORNERS)
def test_corners_take_seconds(
    accountant: str, target: float, delta: float, rate: float, steps: int
) -> None:
    sigma, book = found_in_seconds(accountant, target, delta, rate, steps)
    book.history = [(0.8 * sigma, rate, steps)]
    assert book.get_epsilon(delta) > target


BOX = [*itertools.product((0.01, 1000.0), (1e-2, 1e-15), (1e-7, 1.0), (1, 10**7))]
LONGEST = [case for case in BOX if case[0] == 0.01 and case[2:] == (1e-7, 10**7)]


@pytest.mark.parametrize(
    "accountant, cases",
    [
        ("pld", [case for case in BOX if case not in LONGEST]),
        *(pytest.param(name, BOX, marks=pytest.mark.slow) for name in ("rdp", "prv")),
        pytest.param("pld", LONGEST, marks=pytest.mark.slow),
    ],
)
def test_all_corners_of_the_range(accountant: str, cases: list[Any]) -> None:
    """Epsilon 0.01 to 1,000, delta 1e-2 to 1e-15, rate 1e-7 to 1, 1 to 10 million steps."""
    for target, delta, rate, steps in cases:
        sigma, book = found_in_seconds(accountant, target, delta, rate, steps)
        # Where delta alone covers the risk of being drawn, hardly any noise is needed.
        covered = accountant != "rdp" and rate * steps < delta
        assert sigma < 0.01 if covered else book.get_epsilon(delta) >= 0.95 * target


@pytest.mark.parametrize(
    "changed, error, match",
    [
        ({}, ValueError, "epochs or steps"),
        ({"steps": 5, "epochs": 1}, ValueError, "epochs or steps"),
        ({"steps": 0}, ValueError, "1 step"),
        ({"steps": 2.5}, TypeError, "steps"),
        ({"epochs": 0.001}, ValueError, "1 step"),
        ({"epochs": math.nan}, ValueError, "epochs"),
        ({"steps": 5, "target_epsilon": 0.0}, ValueError, "target_epsilon"),
        ({"steps": 5, "target_epsilon": "2"}, TypeError, "target_epsilon must be a number"),
        ({"steps": 5, "target_delta": 1.0}, ValueError, "delta"),
        ({"steps": 5, "sample_rate": 0.0}, ValueError, "sample_rate"),
        ({"steps": 5, "sample_rate": 1.5}, ValueError, "sample_rate"),
        ({"steps": 5, "epsilon_tolerance": 0.0}, ValueError, "epsilon_tolerance"),
        ({"steps": 5, "accountant": "rpd"}, ValueError, "rpd"),
        ({"steps": 5, "eps_eror": 0.1}, TypeError, "eps_eror"),
        ({"steps": 5, "eps_eror": 0.1, "accountant": "prv"}, TypeError, "eps_eror"),
    ],
)
def test_refused(changed: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        get_noise_multiplier(**{**BUDGET, **changed})


@pytest.mark.filterwarnings("ignore:The GDP accountant")
@pytest.mark.parametrize("target", [5.0, 9.0, 12.0, 20.0])
def test_gdp_finds_a_value_for_large_budgets(target: float) -> None:
    sigma = get_noise_multiplier(
        target_epsilon=target, target_delta=1e-5, sample_rate=0.0025, epochs=100, accountant="gdp"
    )
    assert 0.1 < sigma < 1.0
