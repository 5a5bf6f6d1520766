"""Rows that begin to move for a reason that no attribute of the model shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus import IsolationError, PrivacyEngine
from opacus.core.record.course import MOST_COURSES, Course

B, T = 4, 5
LATER = 3
stages: list[str] = []


class Net(nn.Module):
    """Reverses the samples for one of its layers as soon as there is a stage, or mixes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if stages == ["mixes"]:
            x = 0.9 * x + 0.1 * x.roll(1, 0)
        x = self.block(x.flip(0)).flip(0) if stages == ["reverses"] else self.block(x)
        return self.head(torch.tanh(x).mean(1))


@pytest.fixture(autouse=True)
def _no_stage() -> Any:
    stages.clear()
    yield
    stages.clear()


def private(mode: str, net: nn.Module | None = None) -> Any:
    net = Net() if net is None else net
    return PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(torch.zeros(8, 6), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )


def step(made: Any, x: Tensor | None = None) -> Tensor:
    """The norms of a step on always the same batch, or this one."""
    if x is None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(B, T, 6, generator=generator) * torch.tensor([0.1, 1, 3, 9]).view(B, 1, 1)
    made[1].zero_grad()
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    criterion(made[0](x), torch.arange(B) % 3).backward()
    made[1].step()
    norms: Any = getattr(made[0], "per_sample_gradient_norms", None)
    return norms if norms is None else norms.clone()


@pytest.mark.parametrize("stage", ["reverses", "mixes"])
@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_such_a_pass_is_checked_before_it_is_released(mode: str, stage: str) -> None:
    made = private(mode)
    for _ in range(LATER):
        step(made)
    stages.append(stage)
    with pytest.raises(IsolationError, match="is not its own"):
        step(made)


def test_from_then_on_it_is_followed() -> None:
    made = private("ghost_bk")
    made[1].isolation = None
    for _ in range(LATER):
        want = step(made)
    stages.append("reverses")
    step(made)
    with pytest.warns(UserWarning, match="moves rows in another way"):
        found = step(made)
    torch.testing.assert_close(found, want)


def test_a_harmless_change_is_checked_once() -> None:
    made = private("ghost_bk")
    checks = made[0].isolation.schedule
    for _ in range(LATER):
        step(made)
    assert checks.checks == 1
    made[0]._module.register_forward_pre_hook(
        lambda _, args: (args[0] * torch.ones((), requires_grad=True),)
    )
    for _ in range(3):
        step(made)
    assert checks.checks == 2


class Branches(Net):
    """Samples meet where one is large, a branch that another number of nodes shows."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if (x > 99).any():
            h = h * 3
        return self.head(torch.tanh(self.block(h)).mean(1))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("at", [0, 1, 5])  # the pass of the second step is followed
def test_a_course_that_was_refused_is_checked_each_time(mode: str, at: int) -> None:
    made = private(mode, Branches())
    usual = torch.randn(B, T, 6, generator=torch.Generator().manual_seed(1))
    large = usual.clone()
    large[0, 0, 0] = 100.0
    for _ in range(at):
        step(made, usual)
    for _ in range(18):
        with pytest.raises(IsolationError, match="is not its own"):
            step(made, large)
        for _ in range(2):
            step(made, usual)


def passes(course: Course, sizes: list[int], **how: bool) -> list[bool]:
    found = []
    for size in sizes:
        course.expect("a structure")
        course.begin()
        x = torch.ones((), requires_grad=True)
        for _ in range(size):
            x = x + 1
        course.end(**{"followed": False, **how})
        found.append(course.new)
    return found


def test_new_courses() -> None:
    course = Course()
    assert passes(course, [3, 3, 4, 4, 3]) == [False, False, True, False, False]
    assert passes(course, [7], followed=True) == [False]
    assert passes(course, [7]) == [False]


def test_a_pass_that_was_followed_says_nothing_of_its_branches() -> None:
    course = Course()
    passes(course, [3])
    assert passes(course, [7, 7], followed=True, looked=True) == [True, False]
    course.forget(course.taken)
    assert passes(course, [7, 3]) == [True, False]


def test_courses_that_depend_on_data_say_nothing() -> None:
    found = passes(Course(), list(range(30)))
    assert 0 < sum(found) <= MOST_COURSES


def test_passes_that_do_not_count() -> None:
    course = Course()
    passes(course, [3])
    course.expect(None)
    course.begin()
    course.end(followed=False)
    assert not course.new
