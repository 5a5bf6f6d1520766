"""The search for a noise multiplier that meets a privacy budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from opacus.accountants.history import (
    as_number,
    check_delta,
    check_sample_rate,
    check_steps,
    check_target,
    make_entry,
)
from opacus.accountants.registry import create_accountant
from opacus.accountants.sampling import Sampling

# Where Opacus ends its search. Ours goes on: ten million full batches at a small budget need more.
MAX_SIGMA = 1e6
_MOST_SIGMA = 1e8

# First upper end of the search; all candidates are fractions of it and of its doubles.
_FIRST_GUESS = 10.0
# Accountants whose epsilon takes long enough to look near the solution of "rdp" first.
_SLOW = ("prv", "pld")
# These accountants search for no less noise than this: where it is enough, delta alone covers the
# risk of being sampled, or epsilon is in the thousands.
_LEAST_SIGMA = 0.01
_MOST_GUESSES = 8
# Accountants whose noise multipliers are those that Opacus finds.
_AS_OPACUS = ("rdp", "prv", "gdp")
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
    sampling: Sampling | None = None,
    **kwargs: Any,
) -> float:
    """Returns a noise multiplier with which training stays within a privacy budget.

    The epsilon of the result, by the same accountant and arguments, never exceeds
    `target_epsilon`. It is below it by at most `epsilon_tolerance` and by at most 5%, unless no
    noise multiplier gives a value that close, or ("prv" and "pld") less than 0.01 would do.

    Args:
        target_epsilon: the budget, above 0.
        target_delta: strictly between 0 and 1.
        sample_rate: probability of one sample being in a batch, above 0 and at most 1.
        epochs: number of epochs, giving ``epochs / sample_rate`` steps, rounded down.
        steps: number of steps; give either this or `epochs`.
        accountant: name of a registered accountant.
        epsilon_tolerance: how far below the target epsilon may be, above 0.
        sampling: how batches are drawn, if not by plain Poisson sampling; "pld" counts it.
        **kwargs: passed to the accountant's `get_epsilon`.

    Raises:
        TypeError: if the accountant's `get_epsilon` does not know an argument of `kwargs`, or a
            number is none.
        ValueError: if an argument is outside its range, or no noise multiplier up to 1e8 meets
            the budget.
    """
    target_epsilon = check_target(target_epsilon)
    if not epsilon_tolerance > 0.0:
        raise ValueError(f"epsilon_tolerance must be above 0, got {epsilon_tolerance!r}")
    delta, rate = check_delta(target_delta), check_sample_rate(sample_rate)
    count = _number_of_steps(rate, epochs, steps)
    least = max(target_epsilon - epsilon_tolerance, _LEAST_SPENT * target_epsilon)

    def values_of(name: str, how: Sampling | None = None, **arguments: Any) -> _Values:
        book = create_accountant(name)

        def epsilon_of(sigma: float) -> float:
            book.history = [make_entry((sigma, rate, how), count)]
            return float(book.get_epsilon(delta=delta, **arguments))

        return _Values(epsilon_of, least, target_epsilon)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about candidates that are not returned
        values = values_of(accountant, sampling, **kwargs)
        if accountant in _SLOW:
            near = values.read_near(_search(values_of("rdp")))
            if near is not None and accountant not in _AS_OPACUS:
                return near
            if near is not None:
                values.read_around(near)
            finest = min(1e-4, 0.01 * epsilon_tolerance / target_epsilon)
            return _search(values, _LEAST_SIGMA, finest)
        return _search(values)


def _number_of_steps(rate: float, epochs: float | None, steps: int | None) -> int:
    """Returns the number of steps to account for, at least 1."""
    if (epochs is None) == (steps is None):
        raise ValueError(f"give either epochs or steps, got epochs={epochs!r} and steps={steps!r}")
    if rate == 0.0:
        raise ValueError("sample_rate must be above 0")
    if steps is not None:
        count = check_steps(steps)
    elif 0.0 < (length := as_number("epochs", epochs)) < math.inf:
        # 3 / (1 / 93) is 279 up to rounding and must not become 278.
        count = math.floor(length / rate * (1.0 + 1e-9))
    else:
        raise ValueError(f"epochs must be finite and above 0, got {epochs!r}")
    if count < 1:
        raise ValueError(f"there must be at least 1 step, got epochs={epochs!r}, steps={steps!r}")
    return count


class _Values:
    """Epsilon as a function of sigma, evaluated rarely because it can take a second.

    Epsilon falls as sigma grows, so a value above the budget settles all smaller sigmas, and one
    that spends too little settles all larger ones.
    """

    def __init__(self, epsilon_of: Callable[[float], float], least: float, most: float) -> None:
        self._epsilon_of, self.least, self.most = epsilon_of, least, most
        self._known: dict[float, float] = {}

    def __call__(self, sigma: float) -> float:
        """Returns epsilon, or a known value on the same side of the target range."""
        for known, epsilon in self._known.items():
            too_low = known >= sigma and epsilon > self.most
            if too_low or (known <= sigma and epsilon < self.least) or known == sigma:
                return epsilon
        return self.read(sigma)

    def read(self, sigma: float) -> float:
        """Returns epsilon."""
        self._known[sigma] = self._epsilon_of(sigma)
        return self._known[sigma]

    def read_near(self, sigma: float) -> float | None:
        """Evaluates epsilon at a few values around `sigma`, a guess of the solution.

        Returns:
            A solution, or None if epsilon jumps too much to come near one.
        """
        slope, last = -1.0, None
        low, high = 0.0, math.inf  # known to be too little, and too much noise
        aim = 0.5 * (self.least + self.most)
        for _ in range(_MOST_GUESSES):
            epsilon = self.read(sigma)
            if self.least <= epsilon <= self.most:
                return sigma
            low, high = (sigma, high) if epsilon > self.most else (low, sigma)
            if epsilon in (0.0, math.inf):
                guess, last = sigma * (0.5 if epsilon == 0.0 else 1.5), None
            else:
                here = (math.log(sigma), math.log(epsilon))
                if last is not None and here[0] != last[0]:
                    slope = min((here[1] - last[1]) / (here[0] - last[0]), -0.1)
                last = here
                step = (math.log(aim) - here[1]) / slope
                guess = math.exp(here[0] + max(-0.7, min(0.7, step)))
            sigma = guess if low < guess < high else math.sqrt(low * high)
        return None

    def read_around(self, sigma: float) -> None:
        """Evaluates a value on either side of the range, which saves halvings."""
        reach = self.most / self.least
        for factor in (reach**-1.5, reach**1.5):
            self.read(sigma * factor)


def _search(values: _Values, least_sigma: float = 0.0, finest: float = 1e-9) -> float:
    """Returns the first sigma met in halving a bracket whose epsilon lies in [least, most].

    Halving a fixed bracket gives the round numbers that Opacus gives, so a run configured by a
    budget is the same run. No smaller one is looked for below `least_sigma`, nor where epsilon
    jumps past the budget, closer to that than `finest`, a part of sigma.
    """
    low, high = 0.0, _FIRST_GUESS
    while (epsilon := values(high)) > values.most:
        low, high = high, 2.0 * high
        if high > _MOST_SIGMA:
            raise ValueError(
                f"target_epsilon = {values.most:g} is too low: even noise_multiplier = {low:g} "
                f"gives epsilon = {values.read(low):.4g}; raise target_epsilon or target_delta, "
                "take fewer steps, or another accountant ('pld' reaches lower values than 'rdp')"
            )
    while epsilon < values.least and high - low > finest * high and high > least_sigma:
        middle = 0.5 * (low + high)
        candidate = values(middle)
        if candidate <= values.most:
            high, epsilon = middle, candidate
        else:
            low = middle
    return high
