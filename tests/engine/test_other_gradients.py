"""Gradients that reach a private model another way than by the criterion: refused, never dropped."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from tests.helpers.releases import batch, build, check, private, want

GHOST = ["ghost", "ghost_bk", "flash_bk"]
MODES = ["hooks", *GHOST]
REGISTER = ["register_hook", "register_post_accumulate_grad_hook"]


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("mode", [*MODES, "functorch", "ew"])
def test_hooked_parameters_are_refused_at_once(mode: str, register: str) -> None:
    model = build()
    handle = getattr(model[2].weight, register)(lambda grad: None)
    with pytest.raises(ValueError, match=r"\['2.weight'\] have hooks"):
        private(model, mode)
    handle.remove()
    private(model, mode)


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("mode", MODES)
def test_hooked_parameters_are_refused_in_the_first_backward(mode: str, register: str) -> None:
    model, (inputs, targets) = build(), batch()
    wrapped, _, criterion, _ = private(model, mode)
    fired: list[Any] = []
    loss = criterion(wrapped(inputs), targets)
    getattr(model[2].weight, register)(fired.append)
    with pytest.raises(ValueError, match=r"\['2.weight'\] have hooks"):
        loss.backward()
    assert not fired


def test_hooks_of_frozen_parameters_are_fine() -> None:
    model = build()
    model[0].weight.register_hook(lambda grad: grad)
    model[0].weight.requires_grad_(False)
    wrapped, optimizer, criterion, _ = private(model, "ghost")
    inputs, targets = batch()
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("mode", GHOST)
def test_second_ordinary_loss_is_refused(mode: str, first: bool) -> None:
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    model.zero_grad()
    wrapped, optimizer, criterion, _ = private(model, mode)
    output = wrapped(inputs)
    private_loss, other = criterion(output, targets), output.square().mean()
    (other if first else private_loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"\d\.(weight|bias) and other private parameters"):
        (private_loss if first else other).backward()
    optimizer.zero_grad()
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    check(model, expected)


def test_gradients_of_inputs_leave_no_rows() -> None:
    """Nor do they count as a batch."""
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    model.zero_grad()
    wrapped, optimizer, criterion, _ = private(model, "hooks", poisson_sampling=True)
    inputs.requires_grad_()
    (grad,) = torch.autograd.grad(wrapped(inputs).square().sum(), inputs)
    assert grad.norm() > 0
    assert all(p.grad_sample is None for p in model.parameters())
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", [*MODES, "functorch"])
def test_gradient_penalties_are_refused(mode: str) -> None:
    """A parameter takes part in the second backward pass where no tap sees it."""
    model, (inputs, _) = nn.Linear(6, 1), batch()
    wrapped, _, _, _ = private(model, mode, criterion=nn.MSELoss(reduction="sum"))
    inputs.requires_grad_()
    output = wrapped(inputs).sum()
    with pytest.raises(RuntimeError, match=r"\(Linear\).* create_graph=True.*'no_op'"):
        torch.autograd.grad(output, inputs, create_graph=True)
    wrapped.disable_hooks()
    (grad,) = torch.autograd.grad(wrapped(inputs).sum(), inputs, create_graph=True)
    assert grad.requires_grad


@pytest.mark.parametrize("mode", GHOST)
def test_gradients_of_inputs_are_fine(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    model.zero_grad()
    wrapped, optimizer, criterion, _ = private(model, mode)
    inputs.requires_grad_()
    output = wrapped(inputs)
    loss = criterion(output, targets)
    (grad,) = torch.autograd.grad(output.square().sum(), inputs, retain_graph=True)
    assert grad.norm() > 0
    loss.backward()
    optimizer.step()
    check(model, expected)
    assert "ordinary loss" not in caplog.text


def test_another_network_trains_through_a_private_one(caplog: pytest.LogCaptureFixture) -> None:
    """As a generator does, between the discriminator's backward and its step."""
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    model.zero_grad()
    wrapped, optimizer, criterion, _ = private(model, "ghost")
    other = nn.Linear(6, 6)
    criterion(wrapped(inputs), targets).backward()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            wrapped(other(inputs)).sum().backward()
    assert other.weight.grad is not None and other.weight.grad.norm() > 0
    optimizer.step()
    check(model, expected)
    said = [r.getMessage() for r in caplog.records if "ordinary loss" in r.getMessage()]
    assert len(said) == 1 and "eval()" in said[0] and "disable_hooks()" in said[0]


@pytest.mark.parametrize("mode", GHOST)
def test_loss_for_the_whole_batch_is_not_added(mode: str) -> None:
    model, (inputs, targets) = build(), batch()
    wrapped, optimizer, criterion, _ = private(model, mode)
    output = wrapped(inputs)
    for combine in (
        lambda: criterion(output, targets) + output.square().mean(),
        lambda: output.square().mean() + criterion(output, targets),
        lambda: criterion(output, targets) * output.norm(),
    ):
        with pytest.raises(ValueError, match="one ordinary loss for the whole batch"):
            combine()
    second = DPLossFastGradientClipping(wrapped, optimizer, nn.MSELoss(reduction="sum"), "sum")
    loss = 0.5 * criterion(output, targets) + torch.tensor(0.1) * second(
        output, torch.zeros_like(output)
    )
    (loss + output.square().mean(1)).backward()  # one a sample is fine
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_complex_parameters_are_refused_by_name(mode: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3, dtype=torch.complex64), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"\['0.weight', '0.bias'\] are complex.*view_as_complex"):
        private(model, mode)
    model[0].requires_grad_(False)
    private(model, mode)
