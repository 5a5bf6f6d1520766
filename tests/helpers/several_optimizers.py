"""A net whose parameters have two optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

B, C = 6, 0.3


class ScheduleFree(torch.optim.SGD):
    """Has the two methods of schedule-free optimizers."""

    training = False

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    every = list(model.parameters())
    return [p for p in every if p.ndim == 2], [p for p in every if p.ndim != 2]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = parts(model)
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(B, 5, generator=draw) * 3, torch.randint(0, 3, (B,), generator=draw)


def private(
    model: nn.Module, optimizer: Any, mode: str, sigma: float = 0.0, c: float = C, **changes: Any
) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine = PrivacyEngine()
    out = engine.make_private(
        module=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=B), noise_multiplier=sigma,
        max_grad_norm=c, poisson_sampling=False, grad_sample_mode=mode,
        noise_generator=torch.Generator().manual_seed(3), **changes,
    )  # fmt: skip
    return engine, out[0], out[1], out[2] if len(out) == 4 else nn.CrossEntropyLoss()


def take_steps(
    model: Any, optimizer: Any, criterion: Any, count: int = 2, part: slice = slice(None)
) -> None:
    x, y = (t[part] for t in batch())
    for _ in range(count):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
