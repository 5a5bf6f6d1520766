"""The arithmetic of correlated noise, against dense matrices and published figures."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.core.privacy.correlation import Correlation
from opacus.core.privacy.key import RunKey
from tests.helpers.correlated import root, toeplitz, worst


@pytest.mark.parametrize("bands", [1, 2, 3, 8])
@pytest.mark.parametrize("separation", [1, 3, 8])
def test_sensitivity_is_that_of_the_worst_pattern(bands: int, separation: int) -> None:
    plan = CorrelatedNoise.square_root(bands, steps=8, separation=separation)
    assert plan.sensitivity == pytest.approx(worst(plan), rel=1e-12)
    assert bands == 1 or plan.sensitivity > 1.1


@pytest.mark.parametrize("weights", [(1.0, 0.5, -0.25), (1.0, -1.2), (1.0, 0.0, -0.7)])
def test_other_weights_are_bounded(weights: tuple[float, ...]) -> None:
    plan = CorrelatedNoise(weights, 7, 2)
    assert plan.sensitivity >= worst(plan) > 1.0


def test_errors_are_those_of_the_matrices() -> None:
    plan = CorrelatedNoise.square_root(4, steps=30, separation=10)
    sums = torch.ones(30, 30, dtype=torch.float64).tril() @ toeplitz(plan.weights, 30)
    want = plan.sensitivity**2 * sums.square().sum(1)
    torch.testing.assert_close(torch.tensor(plan.squared_errors(), dtype=torch.float64), want)


def test_one_band_is_independent_noise() -> None:
    plan = CorrelatedNoise.square_root(1, steps=12, separation=4)
    assert plan.sensitivity**2 == pytest.approx(3.0)  # takes part three times
    assert plan.squared_errors() == pytest.approx([3.0 * n for n in range(1, 13)])


@pytest.mark.parametrize("steps", [100, 1000])
def test_published_error_of_the_whole_square_root(steps: int) -> None:
    """``(ln n + gamma + ln 16) / pi`` in the limit (arXiv 2404.16706), from below 0.001 away."""
    plan = CorrelatedNoise.square_root(steps, steps=steps)
    largest = math.sqrt(plan.squared_errors()[-1])
    ratios = [math.comb(2 * k, k) / 4**k for k in range(steps)]
    assert largest == pytest.approx(math.fsum(r * r for r in ratios), rel=1e-12)
    limit = (math.log(steps) + 0.5772156649 + math.log(16)) / math.pi
    assert largest == pytest.approx(limit, abs=1e-3)


def test_bands_pay() -> None:
    """1,000 steps, ten passes: root mean squared error of the sums of gradients."""
    found = {}
    for bands in (1, 2, 8, 64):
        errors = CorrelatedNoise.square_root(bands, steps=1000, separation=100).squared_errors()
        found[bands] = math.sqrt(math.fsum(errors) / len(errors))
    assert found[1] == pytest.approx(math.sqrt(10 * 1001 / 2))
    assert [found[1] / found[bands] for bands in (2, 8, 64)] == pytest.approx(
        [1.73, 3.38, 5.72], abs=0.01
    )


def test_two_optimised_weights_are_the_best_two() -> None:
    """``C`` has powers of a, so the error is known in closed form; the best a by a fine grid."""
    steps = 400

    def error(a: float) -> float:
        of_steps = [steps - i for i in range(steps)]
        sums = of_steps[0] + (1 - a) ** 2 * sum(of_steps[1:])
        return math.sqrt(sums / steps * (1 - a ** (2 * steps)) / (1 - a * a))

    best = min(error(a / 10_000) for a in range(9000, 9990))
    found = CorrelatedNoise.optimised(2, steps=steps)
    assert root(found) == pytest.approx(best, rel=1e-3)
    assert root(found) == pytest.approx(error(-found.weights[1]), rel=1e-9)


def test_optimised_weights_are_much_better_where_they_are_few() -> None:
    for bands, least in ((4, 5.0), (8, 5.4)):
        found = CorrelatedNoise.optimised(bands, steps=1000, separation=100)
        assert len(found.weights) == bands
        assert math.sqrt(10 * 1001 / 2) / root(found) > least
    assert CorrelatedNoise.optimised(1, steps=5) == CorrelatedNoise.square_root(1, steps=5)


@pytest.mark.parametrize("separation", [2, 8])
def test_sensitivity_of_optimised_weights_is_a_bound(separation: int) -> None:
    found = CorrelatedNoise.optimised(3, steps=8, separation=separation)
    assert worst(found) <= found.sensitivity * (1 + 1e-12) < 1.2 * worst(found)


class Parts:
    """A split of the data, with a key of its own."""

    latest = -1

    def __init__(self, count: int) -> None:
        self.count, self.key = count, RunKey()

    def __len__(self) -> int:
        return self.count


def test_a_run_keeps_to_its_plan() -> None:
    run = Correlation(CorrelatedNoise((1.0, -0.5, 0.0, -0.25), 6, 3), Parts(3))
    run.take_part(0, 9)
    assert run.past(10, 2.0) == []
    assert run.past(12, 2.0) == [(-0.5, 11)]
    assert run.past(15, 2.0) == [(-0.5, 14), (-0.25, 12)]
    with pytest.raises(RuntimeError, match="all 6 steps"):
        run.past(16, 2.0)
    with pytest.raises(RuntimeError, match="must not change"):
        run.past(14, 2.1)
    for other in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert other.plan == run.plan and other.past(99, 7.0) == []
        with pytest.raises(RuntimeError, match="no data loader"):
            other.take_part(0, 99)
    again = Correlation(run.plan, Parts(3))
    with pytest.raises(RuntimeError, match="too recently"):
        again.take_part(0, 9)
        again.split = Parts(3)
        again.take_part(1, 10)
    again.load_state_dict(run.state_dict())
    again.take_part(1, 10)
    assert again.split.key.key == run.split.key.key and again.rate(11, 0.1) == run.rate(11, 0.1)
    with pytest.raises(ValueError, match="as many batches"):
        Correlation(run.plan, Parts(4)).load_state_dict(run.state_dict())
    with pytest.raises(ValueError, match="go on with the same"):
        Correlation(CorrelatedNoise.square_root(2, steps=6)).load_state_dict(run.state_dict())


def test_who_takes_part_too_soon_is_refused() -> None:
    plan = CorrelatedNoise.square_root(2, steps=90, separation=3)
    run = Correlation(plan, Parts(3))
    for number, part in enumerate([0, 1, 2, 0, 1, 2]):
        run.take_part(part, number)
    skipping = Correlation(plan, Parts(3))
    skipping.take_part(0, 0)
    with pytest.raises(RuntimeError, match="too recently"):
        skipping.take_part(2, 1)  # part 2 would be one step early
    with pytest.raises(RuntimeError, match="too recently"):
        run.take_part(2, 6)
    run.take_part(0, 8)  # steps that came to nothing lie in between
    with pytest.raises(RuntimeError, match="too recently"):
        run.take_part(0, 10)


def test_values_out_of_range() -> None:
    for weights, steps, separation in (((0.5,), 3, 3), ((1.0, math.nan), 3, 3), ((1.0,), 0, 1)):
        with pytest.raises(ValueError):
            CorrelatedNoise(weights, steps, separation)
    with pytest.raises(ValueError, match="bands"):
        CorrelatedNoise.square_root(0, steps=3)
