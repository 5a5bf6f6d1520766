"""What is set on a private optimizer is checked as what ``make_private`` was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

B = 4
INPUTS, TARGETS = torch.randn(B, 3), torch.randint(2, (B,))


def make(mode: str, **changes: Any) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    engine, model = PrivacyEngine(accountant="rdp"), nn.Linear(3, 2)
    reduction = changes.get("loss_reduction", "mean")
    module, optimizer, *rest = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        data_loader=DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=B),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **changes,
    )
    criterion = rest[0] if len(rest) == 2 else nn.CrossEntropyLoss(reduction=reduction)
    return engine, module, optimizer, criterion


WRONG = [
    ("loss_reduction", "x", ValueError, "loss_reduction must be one of"),
    ("loss_reduction", None, ValueError, "loss_reduction must be one of"),
    ("expected_batch_size", 0, ValueError, "expected_batch_size must be > 0"),
    ("expected_batch_size", "8", TypeError, "expected_batch_size must be a number"),
]


@pytest.mark.parametrize(("name", "value", "kind", "message"), WRONG)
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_wrong_values_are_refused_when_set(
    mode: str, name: str, value: Any, kind: type[Exception], message: str
) -> None:
    _, module, optimizer, criterion = make(mode)
    before = getattr(optimizer, name)
    with pytest.raises(kind, match=message):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before
    criterion(module(INPUTS), TARGETS).backward()
    optimizer.step()


@pytest.mark.parametrize("own_scaling", [False, True])
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_mean_without_a_size_releases_nothing(mode: str, own_scaling: bool) -> None:
    engine, module, optimizer, criterion = make(mode, loss_reduction="sum")
    if own_scaling:  # noise and division are two passes then
        optimizer.scale_grad = lambda: type(optimizer).scale_grad(optimizer)
    optimizer.expected_batch_size, optimizer.loss_reduction = None, "mean"
    criterion(module(INPUTS), TARGETS).backward()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match="expected_batch_size is needed"):
        optimizer.step()
    assert all(p.grad is None for p in module.parameters()) and len(engine.accountant) == 0
    assert all(map(torch.equal, module.parameters(), before))
