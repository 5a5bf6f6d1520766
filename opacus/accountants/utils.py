"""The search for a noise multiplier that meets a privacy budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from opacus.accountants.history import check_delta, check_sample_rate, check_steps
from opacus.accountants.registry import create_accountant

MAX_SIGMA = 1e6

# First upper end of the search; all candidates are fractions of it and of its doubles.
_FIRST_GUESS = 10.0
# The result spends at least this part of the budget, however large the tolerance.
_LEAST_SPENT = 0.95


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
    **kwargs: Any,
) -> float:
    """Returns a noise multiplier with which training stays within a privacy budget.

    The epsilon of the result, by the same accountant and arguments, never exceeds
    `target_epsilon`. It is below it by at most `epsilon_tolerance` and by at most 5%, unless no
    noise multiplier gives a value that close.

    Args:
        target_epsilon: the budget, above 0.
        target_delta: strictly between 0 and 1.
        sample_rate: probability of one sample being in a batch, above 0 and at most 1.
        epochs: number of epochs, giving ``epochs / sample_rate`` steps, rounded down.
        steps: number of steps; give either this or `epochs`.
        accountant: name of a registered accountant.
        epsilon_tolerance: how far below the target epsilon may be, above 0.
        **kwargs: passed to the accountant's `get_epsilon`.

    Raises:
        TypeError: if the accountant's `get_epsilon` does not know an argument of `kwargs`.
        ValueError: if an argument is outside its range, or no noise multiplier up to `MAX_SIGMA`
            meets the budget.
    """
    if not 0.0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be finite and above 0, got {target_epsilon!r}")
    if not epsilon_tolerance > 0.0:
        raise ValueError(f"epsilon_tolerance must be above 0, got {epsilon_tolerance!r}")
    delta, rate = check_delta(target_delta), check_sample_rate(sample_rate)
    count = _number_of_steps(rate, epochs, steps)
    book = create_accountant(accountant)

    def epsilon_of(sigma: float) -> float:
        book.history = [(sigma, rate, count)]
        return float(book.get_epsilon(delta=delta, **kwargs))

    least = max(target_epsilon - epsilon_tolerance, _LEAST_SPENT * target_epsilon)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about candidates that are not returned
        return _search(epsilon_of, least, target_epsilon)


def _number_of_steps(rate: float, epochs: float | None, steps: int | None) -> int:
    """Returns the number of steps to account for, at least 1."""
    if (epochs is None) == (steps is None):
        raise ValueError(f"give either epochs or steps, got epochs={epochs!r} and steps={steps!r}")
    if rate == 0.0:
        raise ValueError("sample_rate must be above 0")
    if steps is not None:
        count = check_steps(steps)
    elif epochs is not None and 0.0 < epochs < math.inf:
        # 3 / (1 / 93) is 279 up to rounding and must not become 278.
        count = math.floor(epochs / rate * (1.0 + 1e-9))
    else:
        raise ValueError(f"epochs must be finite and above 0, got {epochs!r}")
    if count < 1:
        raise ValueError(f"there must be at least 1 step, got epochs={epochs!r}, steps={steps!r}")
    return count


def _search(epsilon_of: Callable[[float], float], least: float, most: float) -> float:
    """Returns the first sigma met in halving a bracket whose epsilon lies in [least, most].

    Halving a fixed bracket reads some fifteen values of epsilon, and gives the round numbers that
    Opacus gives, so a run configured by a budget is the same run.
    """
    low, high = 0.0, _FIRST_GUESS
    epsilon = epsilon_of(high)
    while epsilon > most:
        low, high = high, 2.0 * high
        if high > MAX_SIGMA:
            raise ValueError(
                f"target_epsilon = {most:g} is too low: even noise_multiplier = {low:g} gives "
                f"epsilon = {epsilon:.4g}; raise target_epsilon or target_delta, take fewer steps, "
                "or another accountant ('prv' reaches lower values than 'rdp')"
            )
        epsilon = epsilon_of(high)
    while epsilon < least and high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        candidate = epsilon_of(middle)
        if candidate <= most:
            high, epsilon = middle, candidate
        else:
            low = middle
    return high
