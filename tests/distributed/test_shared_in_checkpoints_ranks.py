"""Tables that all samples share, in checkpoints under FSDP2: the oracle's sums on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.oracle import clipped_sum, norms, per_sample_gradients
from tests.helpers.shared_tables import LOSS, B, Net, T, products, windows

MODES = ("ghost_fsdp", "ghost_fsdp_bk")
INSIDE = ("", "use", "lookup and use", "two blocks")


def worst(rank: int, world_size: int, mode: str, use: Any, inside: str) -> float:
    """Largest difference of a gradient from the oracle's, relative to C."""
    draw = torch.Generator().manual_seed(1)
    count = B * world_size
    x, y = torch.randn(count, T, 2, generator=draw).double(), torch.arange(count) % 3
    rows = per_sample_gradients(Net(use, inside), lambda m, one: LOSS(m(one[0]), one[1]), (x, y))
    c = float(norms(rows).min()) / 2
    model = Net(use, inside).double()
    for part in (model.patch, model.head):
        fully_shard(part)
    fully_shard(model)
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=c,
        data_loader=DataLoader(TensorDataset(x), batch_size=count), poisson_sampling=False,
        grad_sample_mode=mode,
    )  # fmt: skip
    mine = slice(rank * B, (rank + 1) * B)
    for _ in range(2):
        optimizer.zero_grad()
        criterion(private(x[mine]), y[mine]).backward()
        optimizer.step()
    errors = []
    for name, total in clipped_sum(rows, c).items():
        grad: Any = model.get_parameter(name).grad
        got = torch.zeros_like(total) if grad is None else grad.full_tensor()
        errors.append(float((got - total / count).abs().max()) / c)
    return max(errors)


def errors_of(rank: int, world_size: int) -> dict[str, float]:
    found = {}
    for mode in MODES:
        for use in (windows, products):
            for inside in INSIDE:
                progress((mode, use.__name__, inside))
                key = f"{mode}, {use.__name__}, {inside}"
                found[key] = worst(rank, world_size, mode, use, inside)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_shared_tables_in_checkpoints(world_size: int) -> None:
    for found in run_distributed(errors_of, world_size):
        assert len(found) == 16
        assert {key: error for key, error in found.items() if not error < 1e-6} == {}
