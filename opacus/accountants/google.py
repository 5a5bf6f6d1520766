"""A second opinion: the same history, counted by Google's dp-accounting."""

from __future__ import annotations

import math
from typing import Any

from opacus.accountants.accountant import IAccountant
from opacus.accountants.history import check_delta, merge_mechanisms
from opacus.accountants.sampling import FixedSize, TruncatedPoisson, UserRows


def dp_accounting_epsilon(
    accountant: IAccountant, delta: float, *, interval: float = 1e-4
) -> float:
    """Returns the epsilon that dp-accounting's privacy loss distribution gives for a history.

    It shares no code with the accountants of this package. It needs the extra ``pld``, takes
    minutes and gigabytes for long runs, and resolves no delta below about 1e-12.

    Args:
        accountant: with a history.
        delta: strictly between 0 and 1.
        interval: losses are rounded to multiples of it.

    Raises:
        ImportError: if dp-accounting is not installed.
    """
    try:
        import dp_accounting  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "dp_accounting_epsilon needs dp-accounting: pip install 'opacus[pld]'"
        ) from error
    delta = check_delta(delta)
    counts = merge_mechanisms(accountant.history)
    if any(sigma == 0.0 for sigma, _, _ in counts):
        return math.inf
    book = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
    for (sigma, rate, sampling), steps in counts.items():
        book.compose(_event(dp_accounting, sigma, rate, sampling), steps)
    return float(book.get_epsilon(delta))


def _event(library: Any, sigma: float, rate: float, sampling: Any) -> Any:
    """Returns dp-accounting's description of one step."""
    if sampling is None:
        return library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(sigma))
    if isinstance(sampling, FixedSize):  # two means a distance of 2 apart, see analysis/pld/steps
        return library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(sigma / 2.0))
    if isinstance(sampling, TruncatedPoisson):
        return library.dp_event.TruncatedSubsampledGaussianDpEvent(
            sampling.dataset_size, rate, sampling.max_batch_size, sigma
        )
    if isinstance(sampling, UserRows):
        from scipy.stats import binom  # type: ignore[import-untyped]

        drawn = range(sampling.rows + 1)
        probabilities = [float(binom.pmf(j, sampling.rows, rate)) for j in drawn]
        return library.dp_event.MixtureOfGaussiansDpEvent(
            sigma, [float(j) for j in drawn], probabilities
        )
    moves = zip(sampling.sensitivities, sampling.probabilities, strict=True)
    kept = [(s, p) for s, p in moves if s > 0.0]
    rest = max(0.0, 1.0 - math.fsum(p for _, p in kept))
    return library.dp_event.MixtureOfGaussiansDpEvent(
        sigma, [0.0, *(s for s, _ in kept)], [rest, *(p for _, p in kept)]
    )
