"""Buffered and banded Toeplitz matrices, against dense matrices and published figures."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opacus.accountants import create_accountant
from opacus.core.privacy import correlated_search as search
from opacus.core.privacy.correlated import CorrelatedNoise
from tests.helpers.correlated import root, toeplitz, worst

BUFFERS = ((-0.4, 0.9), (-0.2, -0.3), (-0.05, 0.5))


def test_weights_and_their_inverse_are_those_of_the_matrices() -> None:
    plan = CorrelatedNoise((1.0,), 9, 9, buffers=BUFFERS)
    for place in range(1, 9):
        want = sum(scale * decay ** (place - 1) for scale, decay in BUFFERS)
        assert plan.coefficients[place] == pytest.approx(want, rel=1e-12)
    inverse = torch.linalg.inv(toeplitz(tuple(plan.coefficients), 9))[:, 0]
    torch.testing.assert_close(torch.tensor(plan._inverse(), dtype=torch.float64), inverse)
    banded = CorrelatedNoise((1.0,), 9, 4, strategy=(1.0, 0.5, 0.25))
    product = toeplitz(tuple(banded.coefficients), 9) @ toeplitz(banded.strategy, 9)
    torch.testing.assert_close(product, torch.eye(9, dtype=torch.float64))
    assert banded.spreads[0] == 1.0 < banded.spreads[-1]


@pytest.mark.parametrize("separation", [3, 8])
def test_sensitivity_of_buffers_is_that_of_the_worst_pattern(separation: int) -> None:
    plan = CorrelatedNoise.buffered(2, steps=8, separation=separation)
    as_weights = CorrelatedNoise(tuple(plan.coefficients), 8, separation)
    assert plan.sensitivity == pytest.approx(worst(as_weights), rel=1e-9)
    assert plan.sensitivity > 1.05


def test_sensitivity_of_a_banded_matrix_is_a_columns_norm() -> None:
    plan = CorrelatedNoise.banded(3, steps=12, groups=4)
    columns = toeplitz(plan.strategy, 12).norm(dim=0)
    assert plan.sensitivity == pytest.approx(float(columns.max()), rel=1e-12)
    assert len(plan.strategy) == 3 and plan.sensitivity > 1.1


# --- published figures ---


def test_published_optimum_of_two_buffers() -> None:
    """Of jax_privacy's tests (`test_optimize_single_participation_golden`, n = 100,000).

    It is where our objective has no slope, and has a minimum.
    """
    decays = torch.tensor([0.9999528892, 0.9857068667], dtype=torch.float64)
    scales = torch.tensor([0.0122853238, 0.1878393665], dtype=torch.float64)
    point = torch.cat([decays.logit(), scales.log()]).requires_grad_(True)

    def loss(at: Tensor) -> Tensor:
        return search.error_of_buffers(at, 100_000, 100_000, True)

    found = loss(point)
    (slope,) = torch.autograd.grad(found, point)
    value = float(found.detach())
    assert float(slope.abs().max()) < 1e-5
    bound = 1 + math.log(100_000) / math.pi
    assert 1.13 < math.exp(value / 2) / bound < 1.16  # 1.16 there
    for place in range(4):
        assert float(loss(point.detach().index_add(0, torch.tensor([place]), _TENTH))) > value


_TENTH = torch.tensor([0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    "steps, buffers, most",
    [
        (10, 1, 1.04),
        (100, 2, 1.03),
        (100, 3, 1.03),
        (1000, 2, 1.04),
        (1000, 3, 1.03),
        (10_000, 1, 1.45),
        (10_000, 3, 1.03),
        (10_000, 4, 1.03),
    ],
)
def test_published_errors_of_buffers(steps: int, buffers: int, most: float) -> None:
    """Root of the largest squared error, relative to 1 + ln(n) / pi (arXiv 2404.16706, eq. 2.8).

    The limits are those of jax_privacy's `test_optimize_single_participation_near_optimal`.
    """
    plan = CorrelatedNoise.buffered(buffers, steps=steps, largest=True)
    ratio = math.sqrt(plan.squared_errors()[-1]) / (1 + math.log(steps) / math.pi)
    assert ratio <= most
    assert ratio > 0.95 * most


def test_three_buffers_beat_eight_optimised_bands() -> None:
    """1,000 steps, ten passes: root mean squared error; independent noise has 70.7."""
    buffered = CorrelatedNoise.buffered(3, steps=1000, separation=100)
    assert root(buffered) == pytest.approx(12.19, abs=0.1)
    assert math.sqrt(10 * 1001 / 2) / root(buffered) > 5.7


# --- amplification ---


def test_one_group_a_batch_is_a_gaussian_mechanism() -> None:
    """At a rate of 1 a group there is no amplification: k times a column make one mechanism.

    As in jax_privacy's `test_helper_stddev_at_max_bands`, with our accountant.
    """
    plan = CorrelatedNoise.banded(10, steps=100)
    assert plan.accounted(0.1) == (1.0, 10)
    composed, one = create_accountant("pld"), create_accountant("pld")
    composed.history = [(3.0, *plan.accounted(0.1))]
    one.history = [(3.0 / math.sqrt(10), 1.0, 1)]
    assert composed.get_epsilon(1e-6) == pytest.approx(one.get_epsilon(1e-6), rel=1e-9)


@pytest.mark.parametrize("epsilon, least, most", [(0.5, 1, 2), (20.0, 10, 10)])
def test_few_bands_for_small_budgets_and_many_for_large(
    epsilon: float, least: int, most: int
) -> None:
    """As in jax_privacy's tests of small and large epsilon: 100 steps, rate 0.1, delta 1e-6."""
    from opacus.accountants.utils import get_noise_multiplier

    errors = {}
    for bands in (1, 2, 4, 10):
        plan = CorrelatedNoise.banded(bands, steps=100)
        rate, steps = plan.accounted(0.1)
        sigma = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=1e-6, sample_rate=rate, steps=steps
        )
        errors[bands] = sigma * root(plan)
    assert least <= min(errors, key=errors.__getitem__) <= most


def test_values_out_of_range() -> None:
    for change in (
        {"buffers": ((-0.5, 1.0),)},
        {"buffers": ((math.inf, 0.5),)},
        {"strategy": (0.5, 0.1)},
        {"strategy": (1.0, 0.5, 0.2, 0.1)},
        {"strategy": (1.0, 0.5), "buffers": BUFFERS},
        {"weights": (1.0, -0.5), "buffers": BUFFERS},
    ):
        with pytest.raises(ValueError, match=r"buffers|strategy|bands"):
            CorrelatedNoise(**{"weights": (1.0,), "steps": 9, "separation": 3, **change})
    with pytest.raises(ValueError, match="buffers must be at least 1"):
        CorrelatedNoise.buffered(0, steps=3)
