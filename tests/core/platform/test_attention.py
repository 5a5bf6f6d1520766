"""Which attention a private model's forward passes may take: cuDNN plans for each new size."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from opacus import GradSampleModule
from opacus.core.platform import attention


@pytest.fixture(autouse=True)
def _few_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "AT_ONCE", 2)
    monkeypatch.setattr(attention, "OFTEN", 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert cudnn_sdp_enabled()
    yield
    assert cudnn_sdp_enabled()


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), [True]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(cudnn_sdp_enabled())
        return self.layer(x)


def step(model: nn.Module, batch: int) -> bool:
    """Whether cuDNN may be taken in the forward pass, and by a checkpoint in the backward pass."""
    loss = model(torch.randn(batch, 2)).sum()
    inside = cudnn_sdp_enabled()
    loss.backward()
    for p in model.parameters():
        p.grad_sample = p.grad = None
    assert inside == cudnn_sdp_enabled() == model._module.seen[-1]
    return inside


def test_sizes_that_come_again() -> None:
    model = GradSampleModule(Seen())
    assert [step(model, n) for n in (5, 6, 7, 5, 8, 7, 6, 7, 8)] == [
        True, True, False, True, False, False, True, True, False,
    ]  # fmt: skip
    model.remove_hooks()


def test_outside_of_training_all_is_as_it_was() -> None:
    model = GradSampleModule(Seen())
    assert [step(model, n) for n in (5, 6, 7)] == [True, True, False]
    model.eval()(torch.randn(9, 2))
    assert model._module.seen[-1] and cudnn_sdp_enabled()
    assert not step(model.train(), 8)
    assert copy.deepcopy(model) is not None
    model.remove_hooks()


def test_several_forward_passes_before_one_backward_pass() -> None:
    """A checkpoint of the first may run again after the second one began."""
    model = GradSampleModule(Seen())
    for n in (5, 6):
        step(model, n)
    one = model(torch.randn(5, 2)).sum()
    other = model(torch.randn(7, 2)).sum()
    assert model._module.seen[-2:] == [True, True] and cudnn_sdp_enabled()
    del one, other
    model.remove_hooks()


def test_what_is_switched_off_stays_off() -> None:
    model = GradSampleModule(Seen())
    enable_cudnn_sdp(False)
    try:
        assert not any(step(model, n) for n in (5, 6, 7, 5))
        model.remove_hooks()
        assert not cudnn_sdp_enabled()
    finally:
        enable_cudnn_sdp(True)
