"""Per-layer clipping in `hooks` when parameters are frozen or unfrozen later."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

NORMS = [0.01, 0.02, 0.03, 0.04]


def private(model: nn.Module, norms: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model.double()
    data = TensorDataset(torch.zeros(32, 4), torch.zeros(32))
    module, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=norms,
        clipping="per_layer",
        poisson_sampling=False,
        loss_reduction="sum",
    )
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).pow(2).sum().backward()
    optimizer.step()


def test_each_parameter_keeps_its_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(model).double()
    module, optimizer = private(model, NORMS)
    x = torch.randn(8, 4, dtype=torch.float64)
    step(module, optimizer, x)
    model[0].weight.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    plain.load_state_dict(model.state_dict())
    want = torch.zeros(8, dtype=torch.float64)
    for row in x:  # one sample at a time, through plain autograd
        (grad,) = torch.autograd.grad(plain(row[None]).pow(2).sum(), [plain[0].bias])
        assert grad.norm() > NORMS[1]
        want += grad * (NORMS[1] / grad.norm())
    step(module, optimizer, x)
    after = list(model.parameters())
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(before[1] - after[1], want, rtol=1e-4, atol=1e-6)


def test_a_parameter_without_a_norm_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    module, optimizer = private(model, NORMS[:3])
    x = torch.randn(8, 4, dtype=torch.float64)
    step(module, optimizer, x)
    model[0].bias.requires_grad_(True)
    before = model[2].weight.detach().clone()
    with pytest.raises((ValueError, RuntimeError), match=r"no clipping norm|made trainable"):
        step(module, optimizer, x)
    assert torch.equal(model[2].weight, before)


def test_ghost_modes_refuse_it_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    data = TensorDataset(torch.zeros(32, 4), torch.zeros(32, dtype=torch.long))
    module, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=NORMS[:3],
        clipping="per_layer",
        grad_sample_mode="ghost",
    )
    model[0].bias.requires_grad_(True)
    before = model[2].weight.detach().clone()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"\['0\.bias'\] have no clipping norm"):
        criterion(module(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long)).backward()
    assert torch.equal(model[2].weight, before) and model[2].weight.grad is None
