"""Numbers that an update depends on: given as public ones, or exact; and how samples are drawn."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from opacus import PrivacyEngine


def private(rows: int, batch_size: int, engine: Any = None, **changes: Any) -> Any:
    model = nn.Linear(3, 2)
    given: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(torch.zeros(rows, 3)), batch_size=batch_size),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    return (engine or PrivacyEngine(accountant="rdp")).make_private(**{**given, **changes})


def step(model: Any, optimizer: Any) -> None:
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()


def test_public_numbers_do_not_depend_on_the_data() -> None:
    for rows in (12, 11):
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, loader = private(
            rows, 4, engine, expected_batch_size=4, sample_rate=0.25, poisson_sampling=True
        )
        assert optimizer.expected_batch_size == 4
        assert loader.sample_rate == 0.25 and len(loader) == 4
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
        assert engine.accountant.history == [(1.0, 0.25, 4)]


def test_given_rate_of_a_loader_that_is_kept() -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, _ = private(12, 4, engine, sample_rate=0.5, poisson_sampling=False)
    step(model, optimizer)
    assert engine.accountant.history == [(1.0, 0.5, 1)]
    assert optimizer.expected_batch_size == 6.0


def test_divisor_is_not_rounded() -> None:
    assert private(1000, 64)[1].expected_batch_size == 62.5
    assert private(99, 10)[1].expected_batch_size == pytest.approx(9.9)


def test_noise_for_a_budget_is_that_of_the_given_rate() -> None:
    sigmas = []
    for rows in (100, 99):
        model = nn.Linear(3, 2)
        _, optimizer, loader = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(rows, 3)), batch_size=9),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=2,
            max_grad_norm=1.0,
            sample_rate=0.1,
            expected_batch_size=10,
        )
        assert loader.sample_rate == 0.1
        sigmas.append(optimizer.noise_multiplier)
    assert sigmas[0] == sigmas[1]


def with_budget(**changes: Any) -> float:
    """The noise that is found for a budget."""
    model = nn.Linear(3, 2)
    arguments = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(torch.zeros(100, 3)), batch_size=10),
        "target_epsilon": 3.0,
        "target_delta": 1e-5,
        "epochs": 2,
        "max_grad_norm": 1.0,
        **changes,
    }
    private = PrivacyEngine(accountant="rdp").make_private_with_epsilon(**arguments)
    return private[1].noise_multiplier


def test_the_search_takes_the_arguments_of_the_accountant() -> None:
    """As in Opacus: one order of Renyi divergence asks for more noise than many."""
    assert with_budget(alphas=[12.0]) > 1.05 * with_budget()
    assert with_budget(epsilon_tolerance=0.14) != with_budget()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 1.0}, "leave it out, or call make_private"),
        ({"epochs": "2"}, "epochs must be a number, got '2'"),
        ({"eps_error": 0.1}, "eps_error"),
    ],
)
def test_what_a_search_cannot_take(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        with_budget(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_batch_size": 0}, "expected_batch_size must be a positive"),
        ({"expected_batch_size": float("inf")}, "expected_batch_size must be a positive"),
        ({"sample_rate": 0.0}, r"sample_rate must be in \(0, 1\]"),
        ({"sample_rate": 1.5}, r"sample_rate must be in \(0, 1\]"),
        ({"data_loader": None}, "data_loader must be the loader .* by hand"),
    ],
)
def test_bad_numbers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private(12, 4, **changes)


@pytest.mark.parametrize("poisson", [True, False])
def test_a_weighted_sampler_is_said(poisson: bool, caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.zeros(12, 3))
    weighted = WeightedRandomSampler([1.0] * 6 + [9.0] * 6, 12)
    with caplog.at_level(logging.WARNING):
        private(12, 4, poisson_sampling=poisson)
        assert "Sampler" not in caplog.text
        loader = DataLoader(data, batch_size=4, sampler=weighted)
        private(12, 4, poisson_sampling=poisson, data_loader=loader)
    assert "The WeightedRandomSampler of data_loader" in caplog.text
    assert ("epsilon does not hold" in caplog.text) != poisson


@pytest.mark.parametrize("poisson", [True, False])
def test_batches_of_a_pass_are_said_to_be_no_poisson_batches(
    poisson: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        private(12, 4, poisson_sampling=poisson)
        assert ("arXiv 2403.17673" in caplog.text) != poisson
        caplog.clear()
        loader = private(12, 4)[2]
        private(12, 4, data_loader=loader, poisson_sampling=False)  # Poisson batches that are kept
        private(12, 12, poisson_sampling=False)  # all samples in each batch
        assert "arXiv" not in caplog.text
