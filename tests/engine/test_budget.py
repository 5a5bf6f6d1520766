"""What ``make_private_with_epsilon`` says of a budget."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

SIZE = 20


def make(delta: Any, engine: PrivacyEngine | None = None) -> Any:
    model = nn.Linear(3, 2)
    return (engine or PrivacyEngine(accountant="rdp")).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(SIZE, 3)), batch_size=5),
        target_epsilon=8.0,
        target_delta=delta,
        epochs=1,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("delta", [1 / SIZE, 0.3])
def test_a_delta_that_protects_nobody_is_told(delta: float) -> None:
    with pytest.warns(UserWarning, match=f"target_delta={delta:g} protects nobody") as caught:
        made = make(delta)
    assert len(made) == 3 and made[1].noise_multiplier > 0  # nothing but a warning
    assert [w.filename for w in caught] == [__file__]


def test_a_smaller_delta_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(0.9 / SIZE)


def test_what_is_no_delta_is_refused_without_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="delta must lie strictly between 0 and 1"):
            make(1.0)


def test_an_engine_that_has_spent_privacy_is_told() -> None:
    engine = PrivacyEngine(accountant="rdp")
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.warns(UserWarning, match="has spent privacy already") as caught:
        make(1e-3, engine)
    assert [w.filename for w in caught] == [__file__]
