"""Settings at the edge of what makes sense, and loops that call ``step`` their own way."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

B = 6
MODES = ["hooks", "ghost", "ghost_bk"]
X = torch.randn(B, 5, generator=torch.Generator().manual_seed(0)) * 3
Y = torch.arange(B) % 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def private(model: nn.Module, mode: str, lr: float = 0.0, make: Any = torch.optim.SGD, **kw: Any):
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "batch_size": B, **kw}
    loader = DataLoader(TensorDataset(X, Y), batch_size=settings.pop("batch_size"))
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=make(model.parameters(), lr=lr),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **settings,
    )
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    return engine, made[0], made[1], criterion


def step(made: Any) -> list[Tensor]:
    _, model, optimizer, criterion = made
    optimizer.zero_grad()
    criterion(model(X), Y).backward()
    optimizer.step()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_grad_norm": float("inf"), "noise_multiplier": 1.0}, "max_grad_norm must be finite"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be > 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be > 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be a finite number"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier must be a finite number"),
        ({"noise_multiplier": -0.1}, "noise_multiplier must be a finite number"),
        ({"loss_reduction": "none"}, "loss_reduction"),
        ({"max_grad_norm": float("inf")}, None),
        ({"max_grad_norm": torch.tensor(0.3)}, None),
        ({"max_grad_norm": np.float64(0.3), "noise_multiplier": np.float32(0.5)}, None),
        ({"batch_size": 2 * B}, None),
        ({"batch_size": 1}, None),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_settings_at_the_edge(mode: str, changes: dict[str, Any], message: str | None) -> None:
    model = build()
    before = {module: set(vars(module)) for module in model.modules()}
    if message is None:
        assert all(grad.isfinite().all() for grad in step(private(model, mode, **changes)))
        return
    with pytest.raises(ValueError, match=message):
        private(model, mode, **changes)
    assert {module: set(vars(module)) for module in model.modules()} == before


@pytest.mark.parametrize("mode", MODES)
def test_public_batches_by_turns(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """An ordinary step is one with hooks off or in eval mode; in train mode it is said."""
    public, labels = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)), torch.arange(9)

    def turns(way: str | None) -> tuple[list[Tensor], int]:
        made = private(build(), mode, lr=0.5)
        engine, model = made[:2]
        ordinary = torch.optim.SGD(model._module.parameters(), lr=0.2)
        for _ in range(2):
            ordinary.zero_grad()
            if way == "disable_hooks":
                model.disable_hooks()
            elif way == "eval":
                model.eval()
            F.cross_entropy(model(public), labels % 3).backward()
            ordinary.step()
            model.enable_hooks()
            model.train()
            ordinary.zero_grad()
            step(made)
        steps = sum(count for _, _, count in engine.accountant.history)
        return [p.detach().clone() for p in model.parameters()], steps

    plain = copy.deepcopy(build())
    for _ in range(2):
        grads = torch.autograd.grad(F.cross_entropy(plain(public), labels % 3), plain.parameters())
        with torch.no_grad():
            for parameter, grad in zip(plain.parameters(), grads, strict=True):
                parameter -= 0.2 * grad
        once = private(plain, mode, lr=0.5)
        step(once)
        plain = once[1].to_standard_module()
    for way in ("disable_hooks", "eval"):
        found, steps = turns(way)
        assert steps == 2
        for one, other in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    if mode != "hooks":
        with caplog.at_level(logging.WARNING):
            turns(None)
        assert "eval() or disable_hooks()" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_closures(mode: str) -> None:
    """The loss comes back, and the step is the one without a closure."""
    want = [grad.clone() for grad in step(private(build(), mode))]
    _, model, optimizer, criterion = private(build(), mode)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(X), Y)
        loss.backward()
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == losses[0]
    assert len(losses) == 1
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("mode", MODES)
def test_optimizers_that_evaluate_more_than_once(mode: str) -> None:
    with pytest.raises(ValueError, match=r"LBFGS.*first-order"):
        private(build(), mode, make=torch.optim.LBFGS, lr=1.0)
