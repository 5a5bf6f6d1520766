"""Steps of every mode, and what may come out of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers import oracle

B, CLIP = 8, 0.5
GHOST = ["ghost", "ghost_bk", "flash_bk"]
MODES = ["hooks", *GHOST]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def batch(rows: int = B) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6) * 3, torch.randint(0, 3, (rows,))


def private(model: nn.Module, mode: str, engine: Any = None, **changes: Any) -> Any:
    """Model, optimizer, criterion and loader."""
    given: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "criterion": nn.CrossEntropyLoss(reduction="sum"),
        "data_loader": DataLoader(TensorDataset(*batch(4 * B)), batch_size=B),
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "poisson_sampling": False,
        "loss_reduction": "sum",
        "grad_sample_mode": mode,
    }
    out = (engine or PrivacyEngine()).make_private(**{**given, **changes})
    if len(out) == 3:
        return (*out[:2], nn.CrossEntropyLoss(reduction="sum"), out[2])
    return out


def want(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    def loss(model: nn.Module, sample: Any) -> Tensor:
        output = model(sample[0])
        output = output[0] if isinstance(output, tuple) else output
        return nn.functional.cross_entropy(output, sample[1])

    gradients = oracle.per_sample_gradients(model, loss, (inputs, targets))
    return list(oracle.clipped_sum(gradients, CLIP).values())


def check(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), grad, rtol=1e-5, atol=1e-6)
