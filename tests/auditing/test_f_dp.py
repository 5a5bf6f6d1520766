"""Bounds from one run for trade-off curves: published numbers, closed forms, true mechanisms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from opacus.accountants import create_accountant
from opacus.accountants.analysis.gdp import eps_from_mu
from opacus.auditing import (
    curve_p_value,
    epsilon_lower_bound,
    gaussian_curve,
    mu_lower_bound,
    p_value,
)
from opacus.auditing.claim import claimed_curve
from opacus.auditing.fdp import curve_is_refuted, scores_refute


def largest(refuted: object, high: float) -> float:
    """The edge of what is refuted, by halving."""
    low = 0.0
    for _ in range(45):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)  # type: ignore[operator]
    return low


# --- the numbers that are printed ---


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "printed"),
    [
        (100, 100, 75, 0.0, 0.702),  # appendix D, p. 45
        (100, 100, 75, 1e-4, 0.699),  # appendix D, p. 46
        (1000, 100, 75, 1e-4, 0.673),  # appendix D, p. 46
        (100_000, 1510, 1439, 1e-5, 2.675),  # section 7, figure 11
        (10_000, 10_000, 9820, 1e-5, 3.87),  # section 7, figure 10, with every canary guessed
    ],
)
def test_epsilon_of_steinke_nasr_and_jagielski(
    canaries: int, guesses: int, correct: int, delta: float, printed: float
) -> None:
    """arXiv 2305.08846, at 95%; the paper rounds some numbers and cuts others."""
    found = largest(
        lambda e: p_value(e, delta, canaries=canaries, guesses=guesses, correct=correct) <= 0.05, 9
    )
    assert found == pytest.approx(printed, abs=1.5e-3)


def test_the_p_value_of_the_paper() -> None:
    found = p_value(math.log(3), 0.0, canaries=100, guesses=100, correct=75)
    assert found == pytest.approx(0.553, abs=5e-4)


@pytest.mark.parametrize(
    ("tests", "guesses", "correct", "published"),
    [(386, 406, 379, 2.164749), (374, 938, 934, 4.7218075), (140, 5436, 5436, 9.133752)],
)
def test_curve_of_mahloujifar_melis_and_chaudhuri(
    tests: int, guesses: int, correct: int, published: float
) -> None:
    """What jax_privacy's own tests expect of arXiv 2410.22235 (`test_epsilon_one_run_close`).

    10,000 quantiles of N(0, 1) and as many of N(1, 1), N(2, 1), N(4, 1), delta 1e-6, 95%. Its best
    threshold is written here, and the number of thresholds that shares the error.
    """
    mu = largest(
        lambda mu: curve_is_refuted(
            gaussian_curve(mu), 0.05 / tests, canaries=20_000, guesses=guesses, correct=correct
        ),
        20,
    )
    assert eps_from_mu(mu=mu, delta=1e-6) == pytest.approx(published, rel=1e-5)


# --- validity ---


def randomised_response(epsilon: float) -> object:
    """Trade-off curve of (epsilon, 0)-DP."""
    return lambda a: max(0.0, 1.0 - math.exp(epsilon) * a, math.exp(-epsilon) * (1.0 - a))


@pytest.mark.parametrize("guesses", [1, 7, 60])
@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_p_values_are_above_the_tails_of_true_mechanisms(guesses: int, mu: float) -> None:
    """m independent Gaussian mechanisms, and m randomised responses: tails are binomial."""
    right = norm.cdf(mu / 2)
    numbers = {"canaries": guesses, "guesses": guesses}
    for correct in range(guesses + 1):
        gauss = curve_p_value(gaussian_curve(mu), **numbers, correct=correct)
        assert gauss >= binom.sf(correct - 1, guesses, right) * (1 - 1e-9)
        response = curve_p_value(randomised_response(mu), **numbers, correct=correct)  # type: ignore[arg-type]
        exact = binom.sf(correct - 1, guesses, 1 / (1 + math.exp(-mu)))
        assert response >= exact * (1 - 1e-9)


def test_one_canary_is_exact() -> None:
    """A right guess of one coin has at most the chance 1 - a where T(a) = a."""
    for mu in (0.2, 1.0, 2.5):
        found = curve_p_value(gaussian_curve(mu), canaries=1, guesses=1, correct=1)
        assert found == pytest.approx(norm.cdf(mu / 2), abs=1e-9)


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_the_bound_of_mu_holds_and_says_something(mu: float) -> None:
    """Wrong in at most 10% of 100 runs and three standard deviations; half of mu is proven."""
    random, runs, m = np.random.default_rng(0), 100, 400
    found = []
    for _ in range(runs):
        included = random.random(m) < 0.5
        scores = random.normal(size=m) + mu * included
        found.append(mu_lower_bound(scores, included, confidence=0.9))
    assert sum(bound > mu for bound in found) <= runs * 0.1 + 3 * math.sqrt(runs * 0.09)
    assert np.mean(found) > 0.4 * mu - 0.1


def test_a_claimed_curve_lies_below_the_mechanism_s() -> None:
    accountant = create_accountant("rdp")
    accountant.history = [(1.0, 1.0, 1)]
    curve = claimed_curve(accountant)
    assert curve is not None
    for rate in (0.0, 1e-3, 0.1, 0.5, 0.9, 1.0):
        assert curve(rate) <= gaussian_curve(1.0)(rate) + 1e-12
    assert curve(0.1) > 0.4  # it says something


def test_understated_noise_is_refuted_where_true_noise_is_not() -> None:
    """Scores of mu = 4 against claims of 0.8 and 4; more than by one epsilon."""
    random, m, alarm = np.random.default_rng(1), 500, 1e-3
    included = random.random(m) < 0.5
    scores = random.normal(size=m) + 4.0 * included
    assert scores_refute(gaussian_curve(0.8), scores, included, alarm)
    assert not scores_refute(gaussian_curve(4.0), scores, included, alarm)
    proven = mu_lower_bound(scores, included, confidence=1 - alarm)
    one = epsilon_lower_bound(scores, included, delta=1e-5, confidence=1 - alarm)
    assert eps_from_mu(mu=proven, delta=1e-5) > 2 * one > 0


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="correct <= guesses"):
        curve_p_value(gaussian_curve(1.0), canaries=5, guesses=4, correct=5)
    with pytest.raises(ValueError, match="NaN"):
        mu_lower_bound([math.nan] * 9, [True] * 9)
