"""Lower bounds of epsilon from one run: what an attacker's guesses prove.

Each of m canaries is in the data by a coin toss of its own. After the run an attacker says of some
of them whether they were in. An (epsilon, delta)-private run limits how many of those guesses can
be right (Steinke, Nasr and Jagielski, arXiv 2305.08846, theorem 5.2), so many right guesses refute
a small epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_HALVINGS = 24
_LARGEST_EPSILON = 64.0
_FEWEST_GUESSES = 8


def p_value(epsilon: float, delta: float, *, canaries: int, guesses: int, correct: int) -> float:
    """Returns a bound on the probability of so many right guesses under (epsilon, delta)-DP.

    Args:
        epsilon: at least 0.
        delta: in [0, 1].
        canaries: number of coin tosses, m.
        guesses: number of canaries that were guessed, at most m.
        correct: number of right guesses, at most `guesses`.

    Raises:
        ValueError: if the numbers do not fit each other.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"need 0 <= correct <= guesses <= canaries, got {correct}, {guesses}, {canaries}"
        )
    if epsilon < 0.0 or not 0.0 <= delta <= 1.0:
        raise ValueError(f"need epsilon >= 0 and delta in [0, 1], got {epsilon!r} and {delta!r}")
    from scipy.stats import binom  # type: ignore[import-untyped]

    right = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if correct == 0 or delta == 0.0:
        return min(1.0, tail)
    below = np.arange(1, correct + 1)
    mass = np.cumsum(binom.pmf(correct - below, guesses, right))  # P[correct > W >= correct - i]
    return min(1.0, tail + 2.0 * canaries * delta * float((mass / below).max()))


def epsilon_lower_bound(
    scores: Sequence[float] | np.ndarray,
    included: Sequence[bool] | np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Returns a lower bound of the run's epsilon that holds with `confidence`.

    If the run is (epsilon, delta)-private, the result is at most epsilon with at least this
    probability, whatever the scores are. The canaries with the highest scores are guessed to be
    in, those with the lowest to be out, equally many; the best of several numbers of guesses
    counts, each tested at its share of the error.

    Args:
        scores: `[m]`, higher for canaries that look as if they were in the data.
        included: `[m]`, the coin tosses.
        delta: of the guarantee; far below 1 / m, or the bound is 0.
        confidence: in (0, 1).

    Raises:
        ValueError: if the shapes differ, a score is NaN, or a number is out of range.
    """
    scores, included = checked_scores(scores, included, confidence)
    guessed = right_guesses(scores, included)
    error = (1.0 - confidence) / len(guessed)
    return max(
        _refuted(delta, len(scores), guesses, correct, error) for guesses, correct in guessed
    )


def checked_scores(
    scores: Sequence[float] | np.ndarray, included: Sequence[bool] | np.ndarray, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns both as arrays `[m]`.

    Raises:
        ValueError: if the shapes differ, a score is NaN, or `confidence` is not in (0, 1).
    """
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if scores.ndim != 1 or scores.shape != included.shape or scores.size < _FEWEST_GUESSES:
        raise ValueError(
            f"scores and included must be [m] with m >= {_FEWEST_GUESSES}, got {scores.shape} and "
            f"{included.shape}"
        )
    if np.isnan(scores).any() or not 0.0 < confidence < 1.0:
        raise ValueError(f"a score is NaN, or confidence is not in (0, 1): {confidence!r}")
    return scores, included


def right_guesses(scores: np.ndarray, included: np.ndarray) -> list[tuple[int, int]]:
    """Returns (guesses, right ones) for several numbers of guesses, fixed before scores are seen.

    The highest scores are guessed to be in, as many of the lowest to be out.
    """
    ordered = included[np.argsort(scores, kind="stable")]
    return [
        (2 * half, int(ordered[-half:].sum()) + int((~ordered[:half]).sum()))
        for half in (number // 2 for number in _numbers_of_guesses(len(ordered)))
    ]


def _numbers_of_guesses(canaries: int) -> list[int]:
    """All, half of them, a quarter, ...: fixed before anything is seen."""
    return [
        canaries >> k for k in range(canaries.bit_length()) if canaries >> k >= _FEWEST_GUESSES
    ][:6]


def _refuted(delta: float, canaries: int, guesses: int, correct: int, error: float) -> float:
    """Returns the largest epsilon whose p-value is at most `error`; 0 if there is none."""

    def refuted(epsilon: float) -> bool:
        value = p_value(epsilon, delta, canaries=canaries, guesses=guesses, correct=correct)
        return value <= error

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _LARGEST_EPSILON
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def gaussian_mu_estimate(
    scores: Sequence[float] | np.ndarray, included: Sequence[bool] | np.ndarray
) -> tuple[float, float]:
    """Returns how far apart included and excluded scores are, in standard deviations of the latter.

    That is mu of Gaussian DP where scores are Gaussian with equal widths, as without sampling. It
    is an estimate for the attacker that the scores stand for, no bound of the mechanism.

    Args:
        scores: `[m]`.
        included: `[m]`, both kinds at least twice.

    Returns:
        (mu, its standard error). Infinity and 0 where excluded scores do not vary.

    Raises:
        ValueError: if there are too few of a kind.
    """
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    inside, outside = scores[included], scores[~included]
    if min(len(inside), len(outside)) < 2:
        raise ValueError(f"need 2 canaries of each kind, got {len(inside)} and {len(outside)}")
    width = float(outside.std(ddof=1))
    if width == 0.0:
        return math.inf, 0.0
    mu = (float(inside.mean()) - float(outside.mean())) / width
    spread = float(inside.var(ddof=1)) / width**2 / len(inside) + 1.0 / len(outside)
    return mu, math.sqrt(spread + mu**2 / (2 * (len(outside) - 1)))
