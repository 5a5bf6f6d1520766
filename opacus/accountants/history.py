"""What happened: the list of noisy steps that every accountant counts.

An entry ``(noise_multiplier, sample_rate, steps)`` says that `steps` consecutive optimizer steps
each added Gaussian noise of standard deviation ``noise_multiplier * sensitivity`` to a sum over a
batch in which every sample takes part with probability `sample_rate`, independently. How much
privacy that costs is a question for an accountant, never for the history.

A step whose batch was drawn in another way has a fourth value, a mapping of plain types that
`opacus.accountants.sampling` makes. No accountant can take it for a step of plain Poisson
sampling: whoever unpacks three values fails, and `merge` refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from opacus.accountants.sampling import Sampling, sampling_from_dict

Entry = tuple[float, float, int] | tuple[float, float, int, dict[str, Any]]
# A kind of step: noise multiplier, sample rate, sampling (None for Poisson).
Mechanism = tuple[float, float, Sampling | None]

# `sample_rate * accumulated_iterations` may pass 1 by rounding only, as in 49 * (1 / 49).
_RATE_ROUNDING = 1e-9


def as_number(name: str, value: Any) -> float:
    """Returns `value` as a plain float, so that a saved history holds plain types only."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error


def check_noise_multiplier(value: Any) -> float:
    """Returns `value` as a float, or raises unless it is finite and not negative."""
    number = as_number("noise_multiplier", value)
    if not (0.0 <= number < math.inf):
        raise ValueError(f"noise_multiplier must be finite and at least 0, got {value!r}")
    return number


def check_sample_rate(value: Any) -> float:
    """Returns `value` as a float, or raises unless it is a probability."""
    number = as_number("sample_rate", value)
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
    number = as_number("delta", value)
    if not (0.0 < number < 1.0):
        raise ValueError(
            f"delta must lie strictly between 0 and 1, got {value!r}; "
            "it is usually chosen below 1 / dataset size"
        )
    return number


def check_target(value: Any) -> float:
    """Returns a budget's epsilon as a float, or raises unless it is finite and above 0."""
    number = as_number("target_epsilon", value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"target_epsilon must be finite and above 0, got {value!r}")
    return number


def make_entry(mechanism: Mechanism, steps: int) -> Entry:
    """Returns the history entry of `steps` steps of `mechanism`."""
    sigma, rate, sampling = mechanism
    return (sigma, rate, steps) if sampling is None else (sigma, rate, steps, sampling.to_dict())


def read_entry(entry: Any) -> tuple[Mechanism, int]:
    """Returns the kind and the number of the steps of a history entry, or raises."""
    if not isinstance(entry, (tuple, list)) or len(entry) not in (3, 4):
        raise ValueError(
            "a history entry must be (noise_multiplier, sample_rate, steps) or, unless sampling "
            f"is plain Poisson, (noise_multiplier, sample_rate, steps, sampling), got {entry!r}"
        )
    rate = check_sample_rate(entry[1])
    sampling = sampling_from_dict(entry[3]) if len(entry) == 4 else None
    if sampling is not None:
        sampling.check_rate(rate)
    return (check_noise_multiplier(entry[0]), rate, sampling), check_steps(entry[2])


def check_entry(entry: Any) -> Entry:
    """Returns one history entry as plain types, or raises."""
    return make_entry(*read_entry(entry))


def merge_mechanisms(history: Iterable[Any]) -> dict[Mechanism, int]:
    """Counts the steps of each distinct mechanism that can leak anything.

    Composition does not depend on the order, so equal mechanisms are added up wherever they
    stand. Entries without steps, or that never touch a sample, are dropped.

    Args:
        history: entries, in any order.

    Returns:
        ``{(noise_multiplier, sample_rate, sampling): steps}`` in order of first appearance.
    """
    counts: dict[Mechanism, int] = {}
    for entry in history:
        mechanism, steps = read_entry(entry)
        if mechanism[1] > 0.0 and steps > 0:
            counts[mechanism] = counts.get(mechanism, 0) + steps
    return counts


def merge(history: Iterable[Any]) -> dict[tuple[float, float], int]:
    """Counts the steps of each distinct mechanism if all of them are plain Poisson sampling.

    Args:
        history: entries, in any order.

    Returns:
        ``{(noise_multiplier, sample_rate): steps}`` in order of first appearance.

    Raises:
        ValueError: if a step was sampled in another way.
    """
    counts: dict[tuple[float, float], int] = {}
    for (noise_multiplier, sample_rate, sampling), steps in merge_mechanisms(history).items():
        refuse_sampling(sampling)
        counts[(noise_multiplier, sample_rate)] = steps
    return counts


def refuse_sampling(sampling: Sampling | None) -> None:
    """Raises ValueError unless sampling is plain Poisson."""
    if sampling is not None:
        raise ValueError(
            f"this accountant counts plain Poisson sampling only, got a step of {sampling}; "
            "create_accountant('pld') counts it"
        )
