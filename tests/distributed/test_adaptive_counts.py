"""Adaptive clipping on ranks: each sample counts once, and the noise of the count needs no seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from tests.helpers.distributed import progress, run_distributed

B, CLIP, RATE, TARGET = 16, 1000.0, 0.5, 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return output


def placed(how: str, rank: int, world_size: int) -> tuple[nn.Module, int, int]:
    """The model, the place of this rank's samples, and the number of such places."""
    torch.manual_seed(0)
    net = Net()
    if how == "ddp":
        return DistributedDataParallel(net), rank, world_size
    if how == "fsdp":
        return fully_shard(net), rank, world_size
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net = parallelize_module(net, mesh["tp"], split)  # type: ignore[assignment]
    return fully_shard(net, mesh=mesh["dp"]), mesh["dp"].get_local_rank(), world_size // 2


def fractions(rank: int, world_size: int, ways: list[tuple[str, str]]) -> list[float]:
    """Of samples within C, as C has moved."""
    found = []
    for how, mode in ways:
        progress((how, mode))
        model, place, places = placed(how, rank, world_size)
        data = torch.randn(B, 6), torch.randint(3, (B,))
        module, optimizer, criterion, _ = PrivacyEngineAdaptiveClipping().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(*data), batch_size=B),
            noise_multiplier=0.5,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            grad_sample_mode=mode,
            clipbound_learning_rate=RATE,
            target_unclipped_quantile=TARGET,
            min_clipbound=1e-3,
        )
        own = slice(place, None, places)
        criterion(module(data[0][own]), data[1][own]).backward()
        optimizer.step()
        found.append(TARGET - math.log(optimizer.max_grad_norm / CLIP) / RATE)
    return found


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(2, [("fsdp", "ghost_fsdp_bk"), ("ddp", "ghost_bk")]), (4, [("fsdp and tp", "ghost_fsdp")])],
)
def test_all_samples_are_within_the_clipping_norm(world_size: int, ways: Any) -> None:
    ranks = run_distributed(fractions, world_size, ways)
    assert all(found == ranks[0] for found in ranks)
    for fraction in ranks[0]:
        assert 0.7 < fraction < 1.3  # six deviations of the noise, a twentieth of the batch
