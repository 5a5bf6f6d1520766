"""DistributedDataParallel around a private model reduces nothing itself, however it is set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers import oracle
from tests.helpers.distributed import attempt, run_distributed

B, CLIP, WIDE = 4, 0.5, 400  # of a layer's weight more than a MB
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "compiled": {"bucket_cap_mb": 1},
}
MODES = ["hooks", "ghost", "ghost_bk"]


class Counted(nn.Sequential):
    """With a buffer that each rank changes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * self.own


class Block(nn.Module):
    """Several buckets of gradients, of which torch compiles each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build() -> nn.Module:
    torch.manual_seed(0)
    return Counted(nn.Linear(5, WIDE), Block(), nn.Linear(WIDE, 3)).double()


def batch(world_size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    rows = B * world_size
    x = torch.randn(rows, 5, generator=draw).double() * 3
    return x, torch.randint(0, 3, (rows,), generator=draw)


def private(replica: nn.Module, data: tuple[Tensor, Tensor], mode: str) -> tuple[Any, Any, Any]:
    """Model, optimizer and criterion of steps on all of the data, without noise."""
    made: Any = PrivacyEngine().make_private(
        module=replica,
        optimizer=torch.optim.SGD(replica.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(*data), batch_size=len(data[0])),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    return (*made[:2], made[2] if len(made) == 4 else nn.CrossEntropyLoss())


def steps(rank: int, world_size: int, way: str, mode: str) -> list[Tensor]:
    """What two steps release without noise."""
    torch._dynamo.reset()
    net = build()
    replica = DistributedDataParallel(net, **WAYS[way])
    data = batch(world_size)
    model, optimizer, criterion = private(replica, data, mode)
    if way == "compiled":
        net[1].compile(backend="aot_eager")
    x, y = (t[rank * B : (rank + 1) * B] for t in data)
    for _ in range(3):
        optimizer.zero_grad()
        net.own.fill_(float(rank))
        criterion(model(x), y).backward()
        optimizer.step()
        assert float(net.own) == 0.0  # rank 0's, as always
    model.to_standard_module()
    assert replica.require_backward_grad_sync and replica.static_graph == (way == "static")
    return [p.grad for p in net.parameters()]


def all_ways(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    return {
        (way, mode): attempt(steps, rank, world_size, way, mode) for way in WAYS for mode in MODES
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("world_size", [2, 4])
def test_released_sums_are_the_oracles(world_size: int) -> None:
    def loss(model: nn.Module, sample: Any) -> Tensor:
        return nn.functional.cross_entropy(model(sample[0]), sample[1])

    gradients = oracle.per_sample_gradients(build(), loss, batch(world_size))
    assert oracle.norms(gradients).min() > CLIP
    want = [total / (B * world_size) for total in oracle.clipped_sum(gradients, CLIP).values()]
    ranks = run_distributed(all_ways, world_size)
    failed = {case: got for one in ranks for case, got in one.items() if isinstance(got, str)}
    assert not failed, failed
    for one in ranks:
        for case, got in one.items():
            for grad, exact in zip(got, want, strict=True):
                assert oracle.relative_error(grad, exact) < 1e-9, case


def only_some(rank: int, world_size: int, mode: str) -> int:
    """Steps on samples in rank 1 alone, so that no other one compares any; how often it does."""
    net = Counted(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    data = batch(world_size)
    model, optimizer, criterion = private(DistributedDataParallel(net), data, mode)
    x, y = data[0].float()[: B * rank], data[1][: B * rank]
    for _ in range(2):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return model.isolation.schedule.checks


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_not_broadcast_where_samples_are_compared(mode: str) -> None:
    assert run_distributed(only_some, 2, mode, timeout=60)[1] > 0
