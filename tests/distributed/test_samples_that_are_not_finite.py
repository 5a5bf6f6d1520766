"""A NaN sample on one rank contributes nothing, to no rank's shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.distributed_utils import run_distributed

C = 0.5


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(6, 5), torch.randint(0, 4, (6,))


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def summed(rank: int, world_size: int, mode: str, deferred: bool) -> list[Tensor]:
    """The clipped sum, when the second sample of rank 0 is NaN."""
    model = FSDP2Wrapper(build())
    x, y = data()
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        loss_reduction="sum",
        noise_multiplier=0.0,
        max_grad_norm=C,
        poisson_sampling=False,
        grad_sample_mode=mode,
        deferred_norm=deferred,
    )
    x[1] = float("nan")
    rows = slice(3 * rank, 3 * rank + 3)
    made[2](made[0](x[rows]), y[rows]).backward()
    made[1].step()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_a_nan_sample_under_fsdp(mode: str, deferred: bool) -> None:
    model, (x, y) = build().double(), data()
    want = [torch.zeros_like(p) for p in model.parameters()]
    for i in (0, 2, 3, 4, 5):
        loss = nn.functional.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
        assert norm > C
        for total, grad in zip(want, grads, strict=True):
            total += grad * (C / (norm + 1e-6))
    for grads in run_distributed(summed, 2, mode, deferred):
        for got, total in zip(grads, want, strict=True):
            torch.testing.assert_close(got.double(), total, rtol=1e-5, atol=1e-6)
