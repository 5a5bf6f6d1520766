"""Ghost modes: p.grad holds the clipped sum, and nobody may change it before the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.releases import batch, build, check, private, want

GHOST = ["ghost", "ghost_bk", "flash_bk"]


def replace(model: nn.Module) -> None:
    model[0].weight.grad = model[0].weight.grad * 2  # type: ignore[index]


def multiply(model: nn.Module) -> None:
    model[0].weight.grad *= 8  # type: ignore[index]


def multiply_all(model: nn.Module) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 2.0)


def add_a_loss(model: nn.Module) -> None:
    nn.functional.linear(torch.randn(2, 6), model[0].weight).sum().backward()  # type: ignore[index]


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


CHANGES = [replace, multiply, multiply_all, add_a_loss, clip]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", GHOST)
def test_changed_sum_is_refused_by_name(mode: str, change: Callable[[Any], None]) -> None:
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    model.zero_grad()
    wrapped, optimizer, criterion, _ = private(model, mode)
    before = [p.detach().clone() for p in model.parameters()]
    criterion(wrapped(inputs), targets).backward()
    change(model)
    with pytest.raises(RuntimeError, match=r"gradients of .*0\.weight.*changed or added"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    # Nothing of it is left to try again with.
    with pytest.raises(RuntimeError, match="found no clipped gradient"):
        optimizer.step()
    optimizer.zero_grad()
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", GHOST)
def test_changed_sum_is_refused_by_the_next_backward(mode: str) -> None:
    model, (inputs, targets) = build(), batch()
    wrapped, _, criterion, _ = private(model, mode)
    criterion(wrapped(inputs), targets).backward()
    multiply(model)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        criterion(wrapped(inputs), targets).backward()


@pytest.mark.parametrize("mode", GHOST)
def test_gradient_that_was_there_before_is_refused(mode: str) -> None:
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    model.zero_grad()
    wrapped, optimizer, criterion, _ = private(model, mode)
    add_a_loss(model)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        criterion(wrapped(inputs), targets).backward()
    optimizer.zero_grad()
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("mode", GHOST)
def test_reading_zeros_and_changes_after_the_step_are_fine(mode: str, to_none: bool) -> None:
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    model.zero_grad()
    wrapped, optimizer, criterion, _ = private(model, mode)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        criterion(wrapped(inputs), targets).backward()
        for parameter in model.parameters():
            assert parameter.grad.norm() > 0
        # A factor 1, by which a Trainer reads the norm.
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        check(model, expected)
        multiply_all(model)
