from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from opacus.accountants import PLDAccountant, create_accountant
from opacus.accountants.analysis.gdp import delta_eps_mu, eps_from_mu
from opacus.accountants.google import dp_accounting_epsilon
from opacus.accountants.sampling import (
    FixedSize,
    GaussianMixture,
    Sampling,
    TruncatedPoisson,
    UserRows,
)
from tests.accountants.contract import DELTA, BoundContract
from tests.accountants.table import QUICK


def book(sigma: float, rate: float, steps: int, sampling: Sampling | None = None) -> PLDAccountant:
    accountant = PLDAccountant()
    entry = (sigma, rate, steps)
    accountant.history = [entry if sampling is None else (*entry, sampling.to_dict())]
    return accountant


class TestPLDAccountant(BoundContract):
    mechanism = "pld"


def test_between_google_and_rdp() -> None:
    """dp-accounting rounds losses up too, by up to 2% of a small epsilon in this table."""
    cases = [case for case in QUICK if case["pld"] is not None][::6]
    assert len(cases) > 30
    for case in cases:
        epsilon = book(case["noise_multiplier"], case["sample_rate"], case["steps"]).get_epsilon(
            case["delta"]
        )
        assert 0.97 * case["pld"] - 1e-3 <= epsilon <= 1.003 * case["pld"] + 3e-4, case
        assert epsilon <= case["rdp"] * (1 + 1e-9), case


def test_values_of_dp_accountings_own_tests() -> None:
    """pld_privacy_accountant_test.py: gaussian_basic, poisson_subsampled_gaussian, mixture."""
    assert book(math.sqrt(3), 1.0, 3).get_epsilon(0.126936) == pytest.approx(1.0, abs=1e-3)
    assert book(0.5, 0.2, 3).get_epsilon(0.15594) == pytest.approx(1.0, abs=1e-3)
    mixed = PLDAccountant()
    first, second = (
        GaussianMixture((0.0, 1.0, 2.0), (0.2, 0.6, 0.2)),
        GaussianMixture((0.0, 2.0, 3.0), (0.33, 0.34, 0.33)),
    )
    mixed.history = [(1.0, 0.8, 3, first.to_dict()), (2.0, 0.67, 2, second.to_dict())]
    assert mixed.get_epsilon(1e-6) == pytest.approx(17.193115, rel=1e-3)
    # accountant_test.py: test_get_smallest_subsampled_gaussian_noise, for (1, 1e-5)
    for sigma, rate, steps in ((0.67379294682, 0.01, 1), (3.20956502598 / 6, 0.001, 25)):
        assert book(sigma, rate, steps).get_epsilon(1e-5) == pytest.approx(1.0, abs=2e-3)
    # truncated_subsampled_gaussian_basic: 17.904330 there, for a looser pair of distributions
    truncated = PLDAccountant()
    truncated.history = [
        (1.0, 0.5, 3, TruncatedPoisson(4, 2).to_dict()),
        (1.0, 0.5, 2, TruncatedPoisson(3, 2).to_dict()),
    ]
    assert 0.8 * 17.904330 < truncated.get_epsilon(1e-6) <= 17.904330 * 1.001
    # truncated: always (1,000 samples, rate 1, 100 stay) is a batch of fixed size, never is Poisson
    always = book(1.0, 1.0, 1, TruncatedPoisson(1000, 100)).get_epsilon(DELTA)
    assert always == pytest.approx(book(1.0, 0.1, 1, FixedSize(1000, 100)).get_epsilon(DELTA))
    never = book(1.0, 0.1, 1, TruncatedPoisson(1000, 1000)).get_epsilon(DELTA)
    assert never == pytest.approx(book(1.0, 0.1, 1).get_epsilon(DELTA))


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-15, 1e-40])
@pytest.mark.parametrize("steps", [1, 100, 10**6])
def test_composition_is_exact_far_out(delta: float, steps: int) -> None:
    """Both rows of a user in every batch make a Gaussian mechanism with twice the sensitivity."""
    mu = 2.0 / 50.0 * math.sqrt(steps)
    exact = eps_from_mu(mu=mu, delta=delta)
    epsilon = book(50.0, 1.0, steps, UserRows(2)).get_epsilon(delta)
    assert exact * (1 - 1e-9) <= epsilon <= exact * 1.003 + 1e-6
    assert book(50.0, 1.0, steps, FixedSize(7, 7)).get_epsilon(delta) == pytest.approx(epsilon)


def test_full_batches_are_exact() -> None:
    """Balle and Wang's analytic Gaussian mechanism (arXiv 1805.06530)."""
    for mu, delta in [(1.0, 1e-5), (0.01, 1e-15), (30.0, 1e-9)]:
        assert book(1.0 / mu, 1.0, 1).get_epsilon(delta) == eps_from_mu(mu=mu, delta=delta)
    mixed = PLDAccountant()
    mixed.history = [(2.0, 1.0, 2), (4.0, 1.0, 3), (1.0, 1e-9, 1)]
    exact = eps_from_mu(mu=math.sqrt(2 / 4 + 3 / 16), delta=DELTA)
    assert exact <= mixed.get_epsilon(DELTA) <= 1.003 * exact


def hockey_stick(upper: Callable[..., Any], lower: Callable[..., Any], epsilon: float) -> float:
    z = np.linspace(-40.0, 40.0, 400_001)
    excess = np.maximum(upper(z) - math.exp(epsilon) * lower(z), 0.0)
    return float(excess.sum() * (z[1] - z[0]))


def outputs(batches: list[tuple[float, float]], sigma: float) -> Callable[[np.ndarray], np.ndarray]:
    """Density of the released sum, given (sum, probability) of each batch."""
    return lambda z: sum(p * norm.pdf(z, total, sigma) for total, p in batches)


def truncated_batches(values: list[float], rate: float, most: int) -> list[tuple[float, float]]:
    found = []
    for drawn in product([False, True], repeat=len(values)):
        chance = math.prod(rate if d else 1 - rate for d in drawn)
        batch = [v for v, d in zip(values, drawn, strict=True) if d]
        stays = list(combinations(batch, min(most, len(batch))))
        found += [(sum(kept), chance / len(stays)) for kept in stays]
    return found


def fixed_batches(values: list[float], size: int) -> list[tuple[float, float]]:
    batches = list(combinations(values, size))
    return [(sum(batch), 1 / len(batches)) for batch in batches]


@pytest.mark.parametrize("others", [(-1.0, -1.0, -1.0), (-1.0, 1.0, 0.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["truncated", "fixed"])
def test_one_step_against_all_batches(
    kind: str, size: int, others: Any, sigma: float = 1.3
) -> None:
    """delta(epsilon) of a small data set, with every batch it can have, never passes the bound."""
    values, rest = [1.0, *others], list(others)
    if kind == "truncated":
        rate, sampling = 0.4, TruncatedPoisson(4, size)
        pair = [truncated_batches(v, rate, size) for v in (values, rest)]
    else:
        rate, sampling = size / 4, FixedSize(4, size)
        pair = [fixed_batches(v, size) for v in (values, rest)]
    with_unit, without = (outputs(batches, sigma) for batches in pair)
    accountant = book(sigma, rate, 1, sampling)
    for delta in (0.1, 1e-4):
        epsilon = accountant.get_epsilon(delta)
        exact = max(
            hockey_stick(with_unit, without, epsilon), hockey_stick(without, with_unit, epsilon)
        )
        assert exact <= delta * (1 + 1e-6)
        if kind == "fixed" and size == 1 and others == (-1.0, -1.0, -1.0) and epsilon > 0.0:
            assert exact >= 0.99 * delta, "the worst case must reach the bound"


def test_rows_of_a_user_by_quadrature() -> None:
    rate, sigma, rows = 0.2, 1.5, 3
    chances = [math.comb(rows, j) * rate**j * (1 - rate) ** (rows - j) for j in range(rows + 1)]
    user = outputs([(float(j), p) for j, p in enumerate(chances)], sigma)
    nobody = outputs([(0.0, 1.0)], sigma)
    accountant = book(sigma, rate, 1, UserRows(rows))
    for delta in (0.1, 1e-3, 1e-6):
        epsilon = accountant.get_epsilon(delta)
        exact = max(hockey_stick(user, nobody, epsilon), hockey_stick(nobody, user, epsilon))
        assert exact == pytest.approx(delta, rel=2e-3)
        assert exact <= delta * (1 + 1e-6)


@pytest.mark.parametrize(
    "rate, sampling",
    [
        (0.01, None),
        (0.01, TruncatedPoisson(10_000, 115)),
        (0.01, FixedSize(10_000, 100)),
        # dp-accounting takes a minute for a mixture.
        pytest.param(0.01, UserRows(4), marks=pytest.mark.slow),
        pytest.param(0.3, GaussianMixture((0.5, 1.5), (0.1, 0.2)), marks=pytest.mark.slow),
    ],
)
def test_against_google(rate: float, sampling: Sampling | None) -> None:
    accountant = book(2.0, rate, 200, sampling)
    google = dp_accounting_epsilon(accountant, DELTA)
    epsilon = accountant.get_epsilon(DELTA)
    assert epsilon <= 1.003 * google
    # dp-accounting takes a looser pair (two replaced values) where a batch is truncated.
    assert epsilon >= (0.8 if isinstance(sampling, TruncatedPoisson) else 0.997) * google


def test_room_of_eight_deviations_costs_nothing() -> None:
    plain = book(1.0, 0.01, 1000).get_epsilon(DELTA)
    roomy = book(1.0, 0.01, 1000, TruncatedPoisson(10_000, 100 + 80)).get_epsilon(DELTA)
    tight = book(1.0, 0.01, 1000, TruncatedPoisson(10_000, 110)).get_epsilon(DELTA)
    assert roomy == pytest.approx(plain, rel=1e-3)
    assert tight > 1.5 * plain


def test_more_rows_of_a_user_cost_more() -> None:
    values = [book(4.0, 0.01, 500, UserRows(rows)).get_epsilon(DELTA) for rows in (1, 2, 4, 8)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(book(4.0, 0.01, 500).get_epsilon(DELTA), rel=1e-2)
    assert values[3] < 8 * values[0] * 1.5  # far better than group privacy


@pytest.mark.parametrize("delta", [delta_eps_mu(eps=eps, mu=0.7) for eps in (0.3, 1.0, 3.0)])
def test_many_rare_steps_become_gaussian(delta: float) -> None:
    """q sqrt(T (e^(1 / sigma^2) - 1)) = mu, with T large (arXiv 1911.11607)."""
    sigma, steps = 20.0, 10**6
    rate = 0.7 / math.sqrt(steps * math.expm1(sigma**-2))
    epsilon = book(sigma, rate, steps).get_epsilon(delta)
    assert epsilon == pytest.approx(eps_from_mu(mu=0.7, delta=delta), rel=5e-3)


def test_name_and_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(create_accountant("pld")) is PLDAccountant
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"opacus\[pld\]"):
        dp_accounting_epsilon(book(1.0, 0.1, 1), DELTA)
