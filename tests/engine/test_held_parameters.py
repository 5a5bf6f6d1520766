"""Private is what the optimizer holds and what is trainable now, not what once was."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.releases import MODES, B, batch, build, check, private, want


def sgd(model: nn.Module, names: tuple[str, ...]) -> torch.optim.SGD:
    held = [p for name, p in model.named_parameters() if name.startswith(names)]
    return torch.optim.SGD(held, lr=0.0)


def partly(names: tuple[str, ...]) -> tuple[nn.Sequential, list[Any]]:
    """A model, and the clipped sums of the parameters of these names as if others were frozen."""
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(names))
    sums = want(model, *batch())
    model.zero_grad(set_to_none=True)
    model.requires_grad_(True)
    return model, sums


@pytest.mark.parametrize("names", [("2.",), ("0.weight", "2.bias")])
@pytest.mark.parametrize("mode", [*MODES, "functorch", "ew"])
def test_what_the_optimizer_does_not_hold_takes_no_part(
    mode: str, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model, sums = partly(names)
    with caplog.at_level(logging.WARNING):
        wrapped, optimizer, criterion, _ = private(model, mode, optimizer=sgd(model, names))
    assert caplog.text.count("does not hold 2 trainable parameters") == 1
    inputs, targets = batch()
    for _ in range(3):
        optimizer.zero_grad()
        criterion(wrapped(inputs), targets).backward()
        optimizer.step()
    held = [p for name, p in model.named_parameters() if name.startswith(names)]
    for parameter, total in zip(held, sums, strict=True):
        torch.testing.assert_close(parameter.grad.double(), total, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        if not name.startswith(names):
            assert getattr(parameter, "grad_sample", None) is None
            assert not hasattr(parameter, "_norm_sample")
            assert mode not in ("ghost", "ghost_bk", "flash_bk") or parameter.grad is None


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_nor_in_batches_of_one_sample(mode: str) -> None:
    model, _ = partly(("2.",))
    wrapped, optimizer, criterion, _ = private(model, mode, optimizer=sgd(model, ("2.",)))
    inputs, targets = batch()
    for rows in (2, 1, 1):  # the latter run without taps
        optimizer.zero_grad()
        criterion(wrapped(inputs[:rows]), targets[:rows]).backward()
        optimizer.step()
    assert wrapped._recorder.lone.ready
    assert all(p.grad is None for p in model[0].parameters())
    plain = build()
    plain[0].requires_grad_(False)
    check(model[2], want(plain, inputs[:1], targets[:1]))


@pytest.mark.parametrize("mode", MODES)
def test_unfreezing_goes_on_exactly(mode: str) -> None:
    """Gradual unfreezing: first the head, then a bias, then all."""
    model, (inputs, targets) = build(), batch()
    model[0].requires_grad_(False)
    wrapped, optimizer, criterion, _ = private(model, mode)

    def step() -> None:
        plain = build()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            own.requires_grad_(other.requires_grad)
        expected = want(plain, inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        criterion(wrapped(inputs), targets).backward()
        optimizer.step()
        held = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
        check(held, expected)

    for parameters in ([], [model[0].bias], [model[0].weight]):
        for parameter in parameters:
            parameter.requires_grad_(True)
        for _ in range(2):
            step()
    optimizer.zero_grad()
    criterion(wrapped(inputs), targets).backward()
    wrapped.to_standard_module()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("mode", MODES)
def test_unfreezing_keeps_what_was_set(mode: str) -> None:
    model, (inputs, targets) = build(), batch()
    model[0].requires_grad_(False)
    wrapped, optimizer, criterion, _ = private(model, mode, poisson_sampling=True)
    model[0].requires_grad_(True)
    criterion(wrapped(inputs), targets).backward()
    with pytest.raises(ValueError, match="Poisson sampling is not compatible"):
        criterion(wrapped(inputs), targets).backward()
    assert optimizer.isolation is wrapped.isolation
    assert wrapped.isolation.recorder is wrapped._recorder


@pytest.mark.parametrize("mode", MODES)
def test_what_nobody_holds_is_not_unfrozen(mode: str) -> None:
    model, (inputs, _) = build(), batch()
    model[0].requires_grad_(False)
    wrapped, _, _, _ = private(model, mode, optimizer=sgd(model, ("2.",)))
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\['0.weight'\] were made trainable after"):
        wrapped(inputs)
    assert len(inputs) == B


def test_without_a_wrapper_it_is_refused() -> None:
    model, (inputs, _) = build(), batch()
    model[0].requires_grad_(False)
    private(model, "ghost", wrap_model=False)
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\['0.weight'\] were made trainable after"):
        model(inputs)


@pytest.mark.parametrize("mode", [*MODES, "functorch"])
def test_modules_that_are_added_later_are_refused_by_name(mode: str) -> None:
    """An adapter, say, with all else frozen: autograd's own gradient would be left in it."""
    model = build()
    wrapped, optimizer, criterion, _ = private(model, mode)
    inputs, targets = batch()
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    model.requires_grad_(False)
    model.append(nn.Linear(3, 3))
    message = r"\['3.weight', '3.bias'\] were made trainable after make_private"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            wrapped(inputs)
    model[3].requires_grad_(False)
    model[:3].requires_grad_(True)
    optimizer.zero_grad()
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    plain = build().append(nn.Linear(3, 3).requires_grad_(False))
    plain.load_state_dict(model.state_dict())
    check(model[:3], want(plain, inputs, targets))
