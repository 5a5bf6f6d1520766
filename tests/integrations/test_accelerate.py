"""Loops of accelerate around ``make_private``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine


@pytest.fixture
def states() -> Iterator[None]:
    """Accelerators share their state, also with those of other tests."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def private(accumulated: int) -> tuple[PrivacyEngine, Any]:
    model = nn.Linear(4, 3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(8, 4), torch.zeros(8).long())
    engine = PrivacyEngine()
    return engine, engine.make_private(
        module=prepared,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
    )


@pytest.mark.usefixtures("states")
def test_an_optimizer_that_leaves_out_steps_is_refused() -> None:
    """It would leave out updates of steps that are counted."""
    with pytest.raises(ValueError, match="gradient_accumulation_steps is above 1"):
        private(2)


@pytest.mark.usefixtures("states")
def test_a_prepared_optimizer_takes_each_step() -> None:
    engine, (model, optimizer, criterion, loader) = private(1)
    for x, y in loader:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert len(engine.accountant) == len(loader)
