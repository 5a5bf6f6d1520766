"""A replay: the backward pass again, whose records are compared with those that were measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

C = 0.05


def released(model: nn.Module, x: Tensor, mode: str, device: str = "cpu") -> Tensor:
    """The clipped sum of one batch, flat, without noise."""
    model = copy.deepcopy(model).to(device)
    x, y = x.to(device), torch.zeros(len(x), dtype=torch.long, device=device)
    trained = [p for p in model.parameters() if p.requires_grad]
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.arange(8)), batch_size=len(x)),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=0.0,
        max_grad_norm=C,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    for _ in range(2):  # what a GPU has found is told before the next norm pass
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in trained]) * len(x)


class Saturated(torch.autograd.Function):
    """An identity whose backward does not scale with the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign()


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Saturated.apply(self.a(x)))


class Checkpointed(nn.Module):
    """Dropout in a checkpoint, before the only layer that is trained or after it."""

    def __init__(self, preserve: bool, before: bool) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 32), nn.Linear(32, 8), nn.Linear(8, 3)
        (self.a if before else self.b).requires_grad_(False)
        self.head.requires_grad_(False)
        self.preserve = preserve

    def part(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        options = {"use_reentrant": False, "preserve_rng_state": self.preserve}
        return self.head(checkpoint(self.part, x, **options))


class InAndOut(nn.Module):
    """A layer that runs in a checkpoint and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = checkpoint(self.a, x, use_reentrant=False)
        return self.head(torch.tanh(self.a(torch.tanh(inside))))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 5


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("kind", [Signs, InAndOut])
def test_factors_do_not_pass_through_the_model(kind: type[nn.Module], mode: str, x: Tensor) -> None:
    """A backward that is not linear bounds what comes out: losses times factors would not."""
    torch.manual_seed(0)
    model = kind()
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for row in x:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(row[None]), torch.zeros(1, dtype=torch.long))
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert flat.norm() > 10 * C
        total += flat * (C / flat.norm())
    assert torch.allclose(released(model, x, mode), total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_other_random_numbers_are_refused(before: bool, x: Tensor) -> None:
    torch.manual_seed(0)
    name = "'b'" if before else "'a'"
    with pytest.raises(RuntimeError, match=f"layer {name}.*something else.*preserve_rng"):
        released(Checkpointed(False, before), x, "ghost")


@pytest.mark.parametrize("before", [True, False])
def test_the_same_random_numbers_are_not(before: bool, x: Tensor) -> None:
    torch.manual_seed(0)
    assert 0 < released(Checkpointed(True, before), x, "ghost").norm() <= 4 * C * (1 + 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("before", [True, False])
def test_on_a_gpu_they_contribute_nothing_and_are_told_later(before: bool, x: Tensor) -> None:
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"step before released nothing.*preserve_rng_state"):
        released(Checkpointed(False, before), x, "ghost", "cuda")
    assert released(Checkpointed(True, before), x, "ghost", "cuda").norm() > 0
