"""Searches for correlated noise with a small error of the sums of gradients.

Power series stand for Toeplitz matrices: W for what white draws are multiplied by, C for its
inverse. Errors are those of prefix sums, of one element, for white draws of deviation 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Above every logarithm of an error.
_FAR = 1e6

Loss = Callable[[Tensor], Tensor]


def descend(start: Sequence[float], loss: Loss, rounds: int) -> list[float] | None:
    """Where L-BFGS gets from ``start``; ``None`` if it gets nowhere.

    Args:
        start: Starting point, float64.
        loss: Of a point; where it is not finite, the search turns back.
        rounds: Most iterations.
    """
    if not start:
        return None
    point = torch.tensor(list(start), dtype=torch.float64, device="cpu").requires_grad_(True)
    search = torch.optim.LBFGS(
        [point], lr=0.1, max_iter=rounds, line_search_fn="strong_wolfe", tolerance_change=1e-9
    )

    def evaluate() -> Tensor:
        search.zero_grad()
        value = loss(point)
        if not math.isfinite(float(value.detach())):
            value = _FAR + 0.0 * point.sum()
        value.backward()
        return value.detach()

    with torch.enable_grad():
        search.step(evaluate)  # type: ignore[arg-type]
    found = [float(value) for value in point.detach()]
    return found if all(map(math.isfinite, found)) else None


def error_of_weights(tail: Tensor, steps: int, separation: int) -> Tensor:
    """Logarithm of error times squared sensitivity, of a W that is given by its coefficients.

    Args:
        tail: ``[bands - 1]``, the coefficients but for the first, which is 1.
        steps, separation: See :class:`opacus.CorrelatedNoise`.
    """
    weights = _filled(tail, steps)
    return _mean_error(weights).log() + _repeated(_reciprocal(weights), separation).log()


def error_of_strategy(tail: Tensor, steps: int) -> Tensor:
    """The same of a banded C, whose columns are apart where a sample takes part again."""
    strategy = _filled(tail, steps)
    return _mean_error(_reciprocal(strategy)).log() + strategy.square().sum().log()


def error_of_buffers(point: Tensor, steps: int, separation: int, largest: bool) -> Tensor:
    """The same of a C that is made by buffers.

    Args:
        point: ``[2 d]``: logits of their decays, logarithms of their scales.
        steps, separation: See :class:`opacus.CorrelatedNoise`.
        largest: The error of the last sum, in place of the mean of all.
    """
    logits, logs = point.chunk(2)
    decays, scales = logits.sigmoid(), logs.exp()
    strategy = _of_buffers(decays, scales, steps)
    weights = _of_buffers(*inverted(decays, scales), steps)
    error = weights.cumsum(0).square().sum() if largest else _mean_error(weights)
    return error.log() + _repeated(strategy, separation).log()


def inverted(decays: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Decays and scales of the buffers of ``1 / (1 + sum_b scale_b x / (1 - decay_b x))``.

    With ``y = 1 / x`` the sum is ``s (y - D)^-1 s``, where s has the roots of the scales; so the
    poles of the inverse are the eigenvalues of ``D - s s^T`` (compare arXiv 2504.21413).

    Args:
        decays: ``[d]``, different.
        scales: ``[d]``, positive.

    Returns:
        Decays and (negative) scales, ``[d]`` each.
    """
    root = scales.sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(decays) - torch.outer(root, root))
    return values, -(root @ vectors).square()


def first_buffers(count: int, steps: int) -> list[float]:
    """A point that :func:`error_of_buffers` can begin with: about ``1 / sqrt(pi j)``."""
    ends = math.log(0.5 / steps), math.log(0.5)
    rates = [math.exp(ends[0] + (k + 0.5) / count * (ends[1] - ends[0])) for k in range(count)]
    total = math.fsum(map(math.sqrt, rates))
    logs = [math.log(0.5 * math.sqrt(rate) / total) for rate in rates]
    return [*(math.log((1 - rate) / rate) for rate in rates), *logs]


def _of_buffers(decays: Tensor, scales: Tensor, steps: int) -> Tensor:
    """``[steps]`` coefficients: 1, then the sums of what the buffers hold of one draw."""
    ages = torch.arange(steps - 1, dtype=torch.float64, device="cpu")
    powers = decays.unsqueeze(1) ** ages
    return torch.cat([decays.new_ones(1), scales @ powers])


def _filled(tail: Tensor, steps: int) -> Tensor:
    head = torch.cat([tail.new_ones(1), tail])[:steps]
    return torch.cat([head, tail.new_zeros(steps - len(head))])


def _reciprocal(series: Tensor) -> Tensor:
    """``[steps]`` coefficients of 1 / series, by Newton's iteration for power series."""
    steps = len(series)
    inverse, known = series.new_ones(1), 1
    while known < steps:
        known = min(2 * known, steps)
        size = 4 * known
        spectrum = torch.fft.rfft(inverse, size)
        product = spectrum * (2 - torch.fft.rfft(series[:known], size) * spectrum)
        inverse = torch.fft.irfft(product, size)[:known]
    return inverse


def _mean_error(weights: Tensor) -> Tensor:
    """Mean squared error of the sums of 1, 2, ... gradients."""
    steps = len(weights)
    left = torch.arange(steps, 0, -1, dtype=torch.float64, device="cpu")
    return (left * weights.cumsum(0).square()).sum() / steps


def _repeated(strategy: Tensor, separation: int) -> Tensor:
    """Squared sensitivity of a sample that takes part as often as it may, for a falling C."""
    steps = len(strategy)
    total = sum(
        torch.cat([strategy.new_zeros(start), strategy[: steps - start]])
        for start in range(0, steps, separation)
    )
    return torch.as_tensor(total).square().sum()
