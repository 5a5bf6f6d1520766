"""The tap: an identity, in value and gradient, whose backward delivers what was saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opacus.core.record.record import ANCHOR, Tap, differentiable, tap_one, trains


class Sink:
    """Stands for a use and for where its backward pass goes."""

    def __init__(self) -> None:
        self.delivered: list[tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        self.trains: list[bool] = []
        self.sink = self

    def deliver(self, use: Any, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        self.trains.append(trains())
        self.delivered.append((use, tensors, grads))


def tapped(use: Sink, output: Tensor, x: Tensor, many: bool) -> Tensor:
    if many:
        return Tap.apply(ANCHOR, use, 1, output, x)[0]
    return tap_one(ANCHOR, use, output, x)


MANY = pytest.mark.parametrize("many", [False, True])


@MANY
def test_it_is_an_identity_and_delivers_what_was_saved(many: bool) -> None:
    use, x = Sink(), torch.randn(4, 3, requires_grad=True)
    output = 2 * x
    result = tapped(use, output, x, many)
    assert torch.equal(result, output) and result.data_ptr() == output.data_ptr()
    weight = torch.randn(4, 3)
    (result * weight).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight)
    ((known, (saved,), (grad,)),) = use.delivered
    assert known is use and saved is x and torch.equal(grad, weight)


@MANY
def test_it_is_reached_where_nothing_else_needs_a_gradient(many: bool) -> None:
    """The anchor puts it into the graph; the anchor's own gradient stays absent."""
    ANCHOR.grad = None  # the taps of compiled graphs leave zeros
    use, x = Sink(), torch.randn(4, 3)
    result = tapped(use, x.clone(), x, many)
    assert result.requires_grad
    result.sum().backward()
    assert len(use.delivered) == 1 and ANCHOR.grad is None


@MANY
def test_an_input_changed_in_place_is_noticed(many: bool) -> None:
    use, x = Sink(), torch.randn(4, 3)
    result = tapped(use, x.clone(), x, many)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    assert not use.delivered


@MANY
def test_in_place_operations_that_follow_are_not_seen(many: bool) -> None:
    use, x = Sink(), torch.randn(4, 3)
    tapped(use, x.clone(), x, many).mul_(3).sum().backward()
    ((_, _, (grad,)),) = use.delivered
    assert torch.equal(grad, torch.full((4, 3), 3.0))


def test_several_outputs_have_their_own_gradients() -> None:
    use, x = Sink(), torch.randn(4, 3)
    a, b = Tap.apply(ANCHOR, use, 2, x.clone(), x.sum(1), x)
    (a.sum() + 5 * b.sum()).backward()
    ((_, (saved,), (first, second)),) = use.delivered
    assert saved is x and torch.equal(first, torch.ones(4, 3))
    assert torch.equal(second, torch.full((4,), 5.0))


def test_gradients_of_others_are_told_from_training() -> None:
    use, x = Sink(), torch.randn(4, 3, requires_grad=True)
    result = tap_one(ANCHOR, use, 2 * x, x).sum()
    torch.autograd.grad(result, x, retain_graph=True)
    result.backward()
    assert use.trains == [False, True]


def test_what_is_differentiable() -> None:
    assert differentiable(torch.zeros(1)) and differentiable(torch.zeros(1, dtype=torch.cfloat))
    assert not differentiable(torch.zeros(1, dtype=torch.long)) and not differentiable(1.0)
