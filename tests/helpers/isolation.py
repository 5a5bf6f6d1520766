"""Models, batches and steps of the tests of the isolation check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

B, C = 8, 0.5


MODES = ["hooks", "functorch", "ghost", "ghost_bk"]


Loss = Callable[[Any, Any, Any], Any]


def private(model: nn.Module, mode: str, criterion: Any = None, **more: Any) -> Any:
    """Model, optimizer, criterion."""
    trained = [p for p in model.parameters() if p.requires_grad]
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=0.1),
        criterion=criterion or nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.arange(4 * B)), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=C, poisson_sampling=False, grad_sample_mode=mode,
        **more,
    )  # fmt: skip
    return out[0], out[1], out[2] if len(out) == 4 else criterion or nn.CrossEntropyLoss()


def plain(model: Any, criterion: Any, batch: Any) -> Any:
    return criterion(model(*batch[:-1]), batch[-1])


def step(parts: Any, batch: Any, loss: Loss = plain) -> None:
    model, optimizer, criterion = parts
    optimizer.zero_grad()
    loss(model, criterion, batch).backward()
    optimizer.step()


def vectors(rows: int = B, width: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, width) * torch.logspace(-1, 1, rows)[:, None], torch.arange(rows) % 3


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def encoder() -> nn.Module:
    layer = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.LayerNorm(16), nn.GELU())
    return nn.Sequential(layer, nn.Linear(16, 3))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(x).T


def in_batch(model: Any, criterion: Any, batch: Any) -> Any:
    return criterion(model(batch[0]), torch.arange(len(batch[0])))
