"""Lower bounds from one run for a whole trade-off curve instead of one (epsilon, delta).

With m canaries of which g are guessed, let r_i be the chance of at least i right guesses *and* that
a random canary is among the right ones, h_i that of at least i right guesses and a wrong one there.
Turning that canary's coin over makes a right guess a wrong one and leaves the rest, so f-DP says
``h_i >= T(1 - r_{i+1})`` for the trade-off curve T. Each level adds mass to r and h in the ratio
i : g - i. So if at least c right guesses had chance tau, the levels below must have so much mass
that all of it together may pass g / m, which refutes the curve (Mahloujifar, Melis and Chaudhuri,
arXiv 2410.22235). It loses much less than (epsilon, delta) does where noise is Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from opacus.auditing.bounds import checked_scores, right_guesses

# Least false negative rate at a false positive rate; convex, decreasing, its own inverse.
TradeOff = Callable[[float], float]

_HALVINGS = 40
_LARGEST_MU = 40.0


def curve_is_refuted(
    curve: TradeOff, chance: float, *, canaries: int, guesses: int, correct: int
) -> bool:
    """Returns whether, under the curve, so many right guesses have less than this chance.

    Args:
        curve: least false negative rate at a false positive rate; equal to its inverse, as curves
            for adding *or* removing one unit are. A curve too low refutes less, so stays valid.
        chance: in (0, 1): that of refuting a true curve.
        canaries: number of coin tosses, m.
        guesses: number of canaries that were guessed, g.
        correct: number of right guesses, at most g.

    Raises:
        ValueError: if the numbers do not fit each other.
    """
    if not 0 <= correct <= guesses <= canaries or not 0.0 < chance < 1.0:
        raise ValueError(
            "need 0 <= correct <= guesses <= canaries and chance in (0, 1), got "
            f"{correct}, {guesses}, {canaries}, {chance!r}"
        )
    right = chance * correct / canaries
    wrong = chance * (guesses - correct) / canaries
    for level in range(correct - 1, -1, -1):
        least = curve(max(0.0, 1.0 - right))
        if least <= wrong:  # then lower levels need no mass either
            break
        right += level / (guesses - level) * (least - wrong)
        wrong = least
        if right + wrong > guesses / canaries:
            return True
    return False


def curve_p_value(curve: TradeOff, *, canaries: int, guesses: int, correct: int) -> float:
    """Returns the most that the chance of so many right guesses can be under the curve.

    Arguments and errors are those of :func:`curve_is_refuted`.
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        refuted = curve_is_refuted(
            curve, middle, canaries=canaries, guesses=guesses, correct=correct
        )
        low, high = (low, middle) if refuted else (middle, high)
    return high


def gaussian_curve(mu: float) -> TradeOff:
    """Returns the trade-off curve of mu-Gaussian DP: ``Phi(Phi^-1(1 - a) - mu)``."""
    from scipy.special import ndtr, ndtri  # type: ignore[import-untyped]

    return lambda rate: float(ndtr(-ndtri(rate) - mu))


def mu_lower_bound(
    scores: Sequence[float] | np.ndarray,
    included: Sequence[bool] | np.ndarray,
    *,
    confidence: float = 0.95,
) -> float:
    """Returns a mu such that the run which made these scores is not better than mu-Gaussian DP.

    If the run is mu-Gaussian DP, the result is at most mu with probability `confidence`, whatever
    the scores are. Guesses are made as in :func:`opacus.auditing.epsilon_lower_bound`.

    Args:
        scores: `[m]`, higher for canaries that look as if they were in the data.
        included: `[m]`, the coin tosses.
        confidence: in (0, 1).

    Raises:
        ValueError: if the shapes differ, a score is NaN, or `confidence` is out of range.
    """
    scores, included = checked_scores(scores, included, confidence)
    guessed = right_guesses(scores, included)
    error = (1.0 - confidence) / len(guessed)
    found = 0.0
    for guesses, correct in guessed:
        numbers = {"canaries": len(scores), "guesses": guesses, "correct": correct}
        if not curve_is_refuted(gaussian_curve(found), error, **numbers):
            continue
        low, high = found, _LARGEST_MU
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            refuted = curve_is_refuted(gaussian_curve(middle), error, **numbers)
            low, high = (middle, high) if refuted else (low, middle)
        found = low
    return found


def scores_refute(
    curve: TradeOff, scores: np.ndarray, included: np.ndarray, false_alarm: float
) -> bool:
    """Returns whether scores refute a curve; of a true curve with at most this chance.

    Args:
        curve: as in :func:`curve_is_refuted`.
        scores: `[m]`.
        included: `[m]`.
        false_alarm: in (0, 1), shared among the numbers of guesses that are tried.
    """
    scores, included = checked_scores(scores, included, 1.0 - false_alarm)
    guessed = right_guesses(scores, included)
    return any(
        curve_is_refuted(
            curve,
            false_alarm / len(guessed),
            canaries=len(scores),
            guesses=guesses,
            correct=correct,
        )
        for guesses, correct in guessed
    )
