"""Lower bounds of epsilon hold, and are not far below what is true."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opacus.auditing import epsilon_lower_bound, gaussian_mu_estimate, p_value


def test_the_p_value_of_pure_privacy_is_a_binomial_tail() -> None:
    """Randomised response of epsilon log 3 is right three times of four: exact for delta 0."""
    tail = sum(math.comb(20, k) * 0.75**k * 0.25 ** (20 - k) for k in range(18, 21))
    got = p_value(math.log(3), 0.0, canaries=50, guesses=20, correct=18)
    assert got == pytest.approx(tail, rel=1e-10)


def test_delta_adds_what_the_theorem_says() -> None:
    """beta + 2 m delta max_i P[v > W >= v - i] / i, by hand."""
    r, v, m, delta = 10, 8, 40, 1e-4
    q = math.e / (1 + math.e)
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    alpha = max(sum(mass[v - i : v]) / i for i in range(1, v + 1))
    want = sum(mass[v:]) + 2 * m * delta * alpha
    assert p_value(1.0, delta, canaries=m, guesses=r, correct=v) == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("epsilon,guesses", [(0.0, 7), (0.5, 30), (3.0, 100)])
def test_all_guesses_right_in_closed_form(epsilon: float, guesses: int) -> None:
    """``(e^epsilon / (1 + e^epsilon))^r``, whatever the number of canaries."""
    want = (math.exp(epsilon) / (1 + math.exp(epsilon))) ** guesses
    for canaries in (guesses, 10 * guesses):
        got = p_value(epsilon, 0.0, canaries=canaries, guesses=guesses, correct=guesses)
        assert got == pytest.approx(want, rel=1e-9)


def test_all_guesses_right() -> None:
    """With 100 right of 100, epsilon is refuted while (1 + e^-epsilon)^-100 <= 5%."""
    edge = -math.log(0.05 ** (-1 / 100) - 1)
    below, above = (
        p_value(edge + shift, 0.0, canaries=100, guesses=100, correct=100)
        for shift in (-0.01, 0.01)
    )
    assert below < 0.05 < above


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_holds_for_randomised_response(epsilon: float) -> None:
    """The worst of all (epsilon, 0)-private mechanisms: wrong in at most 10% + 3 deviations."""
    random, runs, m = np.random.default_rng(0), 60, 200
    wrong = total = 0
    right = 1 / (1 + math.exp(-epsilon))
    for _ in range(runs):
        included = random.random(m) < 0.5
        answers = np.where(random.random(m) < right, included, ~included)
        scores = answers + 1e-3 * random.random(m)
        bound = epsilon_lower_bound(scores, included, delta=0.0, confidence=0.9)
        wrong += bound > epsilon
        total += bound
    assert wrong <= runs * 0.1 + 3 * math.sqrt(runs * 0.09)
    assert total / runs > 0.4 * epsilon - 0.15


def test_scores_of_chance_prove_nothing_and_perfect_ones_much() -> None:
    random = np.random.default_rng(1)
    included = random.random(1000) < 0.5
    found = [epsilon_lower_bound(random.normal(size=1000), included, delta=1e-6) for _ in range(20)]
    assert sum(bound > 0 for bound in found) <= 4  # 1 expected; above 4: chance 0.3%
    assert epsilon_lower_bound(included * 1.0, included, delta=1e-9) > 4.5
    assert epsilon_lower_bound(included * 1.0, included, delta=0.5) == 0.0


def test_mu_of_a_gaussian() -> None:
    random = np.random.default_rng(2)
    included = random.random(4000) < 0.5
    scores = 3.0 * (random.normal(size=4000) + 1.5 * included) + 7.0
    mu, error = gaussian_mu_estimate(scores, included)
    assert 0.0 < error < 0.06
    assert abs(mu - 1.5) < 4 * error


@pytest.mark.parametrize(
    "call",
    [
        lambda: p_value(1.0, 0.0, canaries=5, guesses=6, correct=1),
        lambda: p_value(-1.0, 0.0, canaries=5, guesses=5, correct=1),
        lambda: epsilon_lower_bound([1.0] * 4, [True] * 4, delta=0.0),
        lambda: epsilon_lower_bound([math.nan] * 9, [True] * 9, delta=0.0),
        lambda: epsilon_lower_bound([1.0] * 9, [True] * 8, delta=0.0),
        lambda: gaussian_mu_estimate([1.0, 2.0], [True, True]),
    ],
)
def test_bad_numbers_are_refused(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]
