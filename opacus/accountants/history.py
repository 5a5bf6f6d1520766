"""What happened: the list of noisy steps that every accountant counts.

An entry ``(noise_multiplier, sample_rate, steps)`` says that `steps` consecutive optimizer steps
each added Gaussian noise of standard deviation ``noise_multiplier * sensitivity`` to a sum over a
batch in which every sample takes part with probability `sample_rate`, independently. How much
privacy that costs is a question for an accountant, never for the history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any

Entry = tuple[float, float, int]

# `sample_rate * accumulated_iterations` may pass 1 by rounding only, as in 49 * (1 / 49).
_RATE_ROUNDING = 1e-9


def _as_number(name: str, value: Any) -> float:
    """Returns `value` as a plain float, so that a saved history holds plain types only."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error


def check_noise_multiplier(value: Any) -> float:
    """Returns `value` as a float, or raises unless it is finite and not negative."""
    number = _as_number("noise_multiplier", value)
    if not (0.0 <= number < math.inf):
        raise ValueError(f"noise_multiplier must be finite and at least 0, got {value!r}")
    return number


def check_sample_rate(value: Any) -> float:
    """Returns `value` as a float, or raises unless it is a probability."""
    number = _as_number("sample_rate", value)
    if not (0.0 <= number <= 1.0 + _RATE_ROUNDING):
        raise ValueError(
            f"sample_rate must be a probability between 0 and 1, got {value!r}; it is the chance "
            "of one sample being in a (logical) batch, about batch size / dataset size"
        )
    return min(number, 1.0)


def rate_of_step(rate_of_batch: float, batches: int) -> float:
    """Returns the sample rate of a step over `batches` batches, or raises if it cannot be one."""
    rate = rate_of_batch * batches
    if batches > 1 and rate > 1.0 + _RATE_ROUNDING:
        raise ValueError(
            f"{batches} batches of sample rate {rate_of_batch} went into one step, so some samples "
            f"are in it more than once, and its sample_rate would be {rate}. Call step() after "
            "each backward(); add several losses of the same samples before one backward()"
        )
    return rate


def check_steps(value: Any) -> int:
    """Returns `value` as an int, or raises unless it is a whole number of at least 0."""
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole:
        raise TypeError(f"steps must be a whole number, got {value!r}")
    if value < 0:
        raise ValueError(f"steps must be at least 0, got {value!r}")
    return int(value)


def check_delta(value: Any) -> float:
    """Returns `value` as a float, or raises unless it lies strictly between 0 and 1."""
    number = _as_number("delta", value)
    if not (0.0 < number < 1.0):
        raise ValueError(
            f"delta must lie strictly between 0 and 1, got {value!r}; "
            "it is usually chosen below 1 / dataset size"
        )
    return number


def check_entry(entry: Any) -> Entry:
    """Returns one history entry as plain types, or raises."""
    try:
        noise_multiplier, sample_rate, steps = entry
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a history entry must be (noise_multiplier, sample_rate, steps), got {entry!r}"
        ) from error
    return (
        check_noise_multiplier(noise_multiplier),
        check_sample_rate(sample_rate),
        check_steps(steps),
    )


def merge(history: Iterable[Any]) -> dict[tuple[float, float], int]:
    """Counts the steps of each distinct mechanism that can leak anything.

    Composition does not depend on the order, so equal (noise_multiplier, sample_rate) pairs are
    added up wherever they stand. Entries without steps, or that never touch a sample, are dropped.

    Args:
        history: entries, in any order.

    Returns:
        ``{(noise_multiplier, sample_rate): steps}`` in order of first appearance.
    """
    counts: dict[tuple[float, float], int] = {}
    for entry in history:
        noise_multiplier, sample_rate, steps = check_entry(entry)
        if sample_rate > 0.0 and steps > 0:
            key = (noise_multiplier, sample_rate)
            counts[key] = counts.get(key, 0) + steps
    return counts
