from __future__ import annotations

import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
    _GradClipScheduler,
    _NoiseScheduler,
)

NOISE, CLIP = "noise_multiplier", "max_grad_norm"


def halve(epoch: int) -> float:
    return 1.0 / (1 + epoch)


# scheduler, its arguments, the attribute, the factors of the start value after 0, 1, 2, ... steps
EXPONENTIAL = [1.0, 0.5, 0.25, 0.125, 0.0625]
STEPWISE = [1.0, 1.0, 0.5, 0.5, 0.25]
LAMBDA = [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
CASES = [
    (ExponentialNoise, {"gamma": 0.5}, NOISE, EXPONENTIAL),
    (StepNoise, {"step_size": 2, "gamma": 0.5}, NOISE, STEPWISE),
    (LambdaNoise, {"noise_lambda": halve}, NOISE, LAMBDA),
    (ExponentialGradClip, {"gamma": 0.5}, CLIP, EXPONENTIAL),
    (StepGradClip, {"step_size": 2, "gamma": 0.5}, CLIP, STEPWISE),
    (LambdaGradClip, {"scheduler_function": halve}, CLIP, LAMBDA),
]
schedulers = pytest.mark.parametrize(
    "scheduler, arguments, attribute, factors", CASES, ids=[case[0].__name__ for case in CASES]
)
Make = Callable[..., Any]


def optimizer() -> Any:
    return SimpleNamespace(noise_multiplier=2.0, max_grad_norm=1.5)


@schedulers
def test_values(
    scheduler: Make, arguments: dict[str, Any], attribute: str, factors: list[float]
) -> None:
    target = optimizer()
    start = getattr(target, attribute)
    other = CLIP if attribute == NOISE else NOISE
    schedule = scheduler(target, **arguments)
    for epoch, factor in enumerate(factors):
        assert schedule.last_epoch == epoch
        assert getattr(target, attribute) == pytest.approx(factor * start)
        assert getattr(target, other) == getattr(optimizer(), other)
        schedule.step()


@schedulers
def test_resumed_schedule_goes_on(
    scheduler: Make, arguments: dict[str, Any], attribute: str, factors: list[float]
) -> None:
    target = optimizer()
    start = getattr(target, attribute)
    schedule = scheduler(target, **arguments)
    for _ in range(3):
        schedule.step()
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    resumed_target = optimizer()
    resumed = scheduler(resumed_target, **arguments)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.last_epoch == 3
    assert getattr(resumed_target, attribute) == pytest.approx(factors[3] * start)
    resumed.step()
    assert getattr(resumed_target, attribute) == pytest.approx(factors[4] * start)


@schedulers
def test_state_of_opacus(
    scheduler: Make, arguments: dict[str, Any], attribute: str, factors: list[float]
) -> None:
    """Opacus 1.6.0 saves functions too."""
    target = optimizer()
    schedule = scheduler(target, **arguments)
    saved = {**schedule.state_dict(), "last_epoch": 3}
    for name, value in arguments.items():
        saved.setdefault(name, value)
    schedule.load_state_dict(saved)
    assert schedule.last_epoch == 3
    assert getattr(target, attribute) == pytest.approx(factors[3] * getattr(optimizer(), attribute))
    schedule.load_state_dict({**saved, "last_epoch": 1})  # and back
    assert getattr(target, attribute) == pytest.approx(factors[1] * getattr(optimizer(), attribute))


@schedulers
def test_bad_state_changes_nothing(
    scheduler: Make, arguments: dict[str, Any], attribute: str, factors: list[float]
) -> None:
    target = optimizer()
    schedule = scheduler(target, **arguments)
    before, value = schedule.state_dict(), getattr(target, attribute)
    missing = {name: before[name] for name in before if name != "last_epoch"}
    forbidden = {**before, "last_epoch": 5000}
    forbidden.update({name: math.inf for name in ("gamma", f"base_{attribute}") if name in before})
    for state in (missing, {**before, "spice": 1}, forbidden):
        with pytest.raises(ValueError, match=r"last_epoch|spice|finite"):
            schedule.load_state_dict(state)
        assert schedule.state_dict() == before
        assert getattr(target, attribute) == value


@schedulers
def test_needs_a_dp_optimizer(
    scheduler: Make, arguments: dict[str, Any], attribute: str, factors: list[float]
) -> None:
    with pytest.raises(ValueError, match=attribute):
        scheduler(torch.optim.SGD([torch.zeros(1)], lr=0.1), **arguments)


@pytest.mark.parametrize(
    "scheduler, arguments, match",
    [
        (ExponentialNoise, {"gamma": -1.0}, "gamma"),
        (ExponentialGradClip, {"gamma": math.nan}, "gamma"),
        (StepNoise, {"step_size": 0, "gamma": 0.5}, "step_size"),
        (StepGradClip, {"step_size": 2, "gamma": 0.0}, "gamma"),
        (LambdaNoise, {"noise_lambda": 3}, "noise_lambda"),
        (LambdaGradClip, {"scheduler_function": None}, "scheduler_function"),
    ],
)
def test_refused_arguments(scheduler: Make, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        scheduler(optimizer(), **arguments)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_value_of_a_function_is_not_set(bad: float) -> None:
    target = optimizer()
    schedule = LambdaNoise(target, noise_lambda=lambda epoch: 1.0 if epoch == 0 else bad)
    with pytest.raises(ValueError, match="noise_multiplier"):
        schedule.step()
    assert (target.noise_multiplier, schedule.last_epoch) == (2.0, 0)


def test_noise_may_reach_zero_but_the_threshold_may_not() -> None:
    target = optimizer()
    LambdaNoise(target, noise_lambda=lambda epoch: 1.0 - epoch).step()
    assert target.noise_multiplier == 0.0
    schedule = LambdaGradClip(target, scheduler_function=lambda epoch: 1.0 - epoch)
    with pytest.raises(ValueError, match="max_grad_norm"):
        schedule.step()
    assert target.max_grad_norm == 1.5


@pytest.mark.parametrize("scheduler", [StepNoise, StepGradClip])
def test_a_resumed_schedule_keeps_the_value_the_run_was_given(scheduler: Make) -> None:
    """A file cannot turn the noise off: schedules multiply."""
    first, second = optimizer(), optimizer()
    first.noise_multiplier, first.max_grad_norm = 0.0, 0.5
    schedule = scheduler(first, step_size=1, gamma=0.5)
    schedule.step()
    resumed = scheduler(second, step_size=1, gamma=3.0)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.state_dict() == schedule.state_dict()
    attribute = scheduler._attribute
    assert getattr(second, attribute) == 0.5 * getattr(optimizer(), attribute)


def test_two_schedules_of_one_optimizer_resume() -> None:
    def both(target: Any) -> list[Any]:
        return [StepNoise(target, step_size=2, gamma=0.5), ExponentialNoise(target, gamma=0.9)]

    first, second = optimizer(), optimizer()
    schedules = both(first)
    for schedule in schedules * 3:
        schedule.step()
    for schedule, resumed in zip(schedules, both(second), strict=True):
        resumed.load_state_dict(schedule.state_dict())
    assert second.noise_multiplier == pytest.approx(first.noise_multiplier)
    assert first.noise_multiplier == pytest.approx(2.0 * 0.5 * 0.9**3)


@pytest.mark.parametrize(
    "base, method",
    [(_NoiseScheduler, "get_noise_multiplier"), (_GradClipScheduler, "get_max_grad_norm")],
)
def test_own_schedule(base: type[Any], method: str) -> None:
    with pytest.raises(NotImplementedError):
        base(optimizer())
    own = type("Own", (base,), {method: lambda self: 3.0 + self.last_epoch})
    target = optimizer()
    schedule = own(target, last_epoch=4)
    assert schedule.last_epoch == 5
    schedule.step()
    assert 9.0 in (target.noise_multiplier, target.max_grad_norm)
    resumed_target = optimizer()
    resumed = own(resumed_target)
    resumed.load_state_dict(schedule.state_dict())  # its value is saved, for want of a factor
    assert vars(resumed_target) == vars(target)


def test_noise_that_the_count_of_adaptive_clipping_cannot_share_is_refused() -> None:
    """Theorem 1 of arXiv:1905.03871 needs sigma < 2 * unclipped_num_std, also of a later sigma."""
    model = torch.nn.Linear(4, 3)
    target = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=torch.nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="adaptive",
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2,
        max_clipbound=10.0,
        min_clipbound=0.1,
        unclipped_num_std=0.8,
    )[1]
    schedule = ExponentialNoise(target, gamma=1.5)
    schedule.step()
    with pytest.raises(
        ValueError, match=r"smaller than 2 \* unclipped_num_std, got 2\.25 and 0\.8"
    ):
        schedule.step()
    assert target.noise_multiplier == 1.5
    with pytest.raises(ValueError, match=r"got 1\.5 and nan"):
        target._privacy.count_noise_std = math.nan
    assert 1.5 < target._privacy.noise_std_at(1.0) < math.inf
