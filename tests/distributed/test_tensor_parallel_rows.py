"""Tensor parallelism: whose rows split layers have, and ranks that do not hold the same samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.distributed import attempt, run_distributed
from tests.helpers.modes import assert_close
from tests.helpers.problems import clipped_sum
from tests.helpers.sharded import full

B, D, CLIP = 6, 8, 0.3
Use = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Layers of several kinds, which a case uses as it likes; the others are not there."""

    def __init__(self, use: Use, without: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(10, D), nn.Embedding(4, D)
        self.up, self.heads, self.down = nn.Linear(D, 16), nn.LayerNorm(4), nn.Linear(16, D)
        self.drop, self.norm, self.head = nn.Dropout(0.5), nn.LayerNorm(D), nn.Linear(D, 3)
        for name in without.split():
            delattr(self, name)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def first_is_split(net: Any, x: Tensor) -> Tensor:
    return net.head(net.norm(net.down(net.up(x).tanh()))).mean(1)


def time_major(net: Any, x: Tensor) -> Tensor:
    h = net.norm(x[:, :4]).transpose(0, 1)  # as many places as samples elsewhere
    return net.head(net.down(net.up(h).tanh())).mean(0)


def embedded(net: Any, x: Tensor) -> Tensor:
    h = net.table((x[:, :4, 0] * 3).long() % 10) + net.places(torch.arange(4))
    return net.head(net.norm(h + net.down(net.up(h).tanh()))).mean(1)


def normalised_heads(net: Any, x: Tensor) -> Tensor:
    h = net.up(net.norm(x))
    h = net.heads(h.view(*h.shape[:-1], -1, 4)).reshape(h.shape)
    return net.head(net.down(h.tanh())).mean(1)


def dropped(net: Any, x: Tensor) -> Tensor:
    return net.head(net.drop(net.down(net.up(net.norm(x)).tanh()))).mean(1)


# What is used, and what is not there.
EXACT: list[tuple[Use, str]] = [
    (first_is_split, "table places heads drop"),
    (time_major, "table places heads drop"),
    (embedded, "heads drop"),
]
REFUSED: list[tuple[Use, str, str]] = [
    (normalised_heads, "table places drop", "other norms of the gradients of 'heads.weight'"),
    (dropped, "table places heads", "other norms of the gradients of"),
    (first_is_split, "table places heads drop", "got different batches"),
]
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def plan_of(net: Net) -> dict[str, Any]:
    split = {"head": ColwiseParallel(output_layouts=Replicate())} if net.use is embedded else {}
    table = RowwiseParallel(input_layouts=Replicate())
    return {**PLAN, **({"table": table} if net.use is embedded else {}), **split}


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(B, B, D, generator=g) * torch.logspace(-1, 1, B)[:, None, None]
    return x, torch.arange(B) % 3


def wanted(net: Net) -> list[Tensor]:
    net, (x, y) = copy.deepcopy(net).double(), batch()
    samples = []
    for i in range(B):
        loss = nn.functional.cross_entropy(net(x[i : i + 1].double()), y[i : i + 1])
        samples.append(list(torch.autograd.grad(loss, list(net.parameters()))))
    return clipped_sum(samples, CLIP)[0]


def private(net: nn.Module, mode: str, poisson: bool = False) -> Any:
    return PrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), noise_multiplier=0.0,
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=3), poisson_sampling=poisson,
        max_grad_norm=CLIP, grad_sample_mode=mode, loss_reduction="sum",
        criterion=nn.CrossEntropyLoss(reduction="sum"),
    )  # fmt: skip


def sums(made: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    made[2](made[0](x), y).backward()
    made[1].step()
    return [full(p.grad).clone() for p in made[1].params]


def split_alone(rank: int, world: int, use: Use, without: str, same: bool) -> list[Tensor]:
    net = Net(use, without)
    parallelize_module(net, init_device_mesh("cpu", (world,)), plan_of(net))
    made = private(net, "ghost_tp")
    x, y = batch()
    torch.manual_seed(rank)  # of dropout
    return sums(made, x if same or use is not first_is_split else x.roll(rank, 0), y)


def all_alone(rank: int, world: int) -> tuple[list[Any], list[Any]]:
    exact = [attempt(split_alone, rank, world, *case, True) for case in EXACT]
    return exact, [attempt(split_alone, rank, world, *case[:2], False) for case in REFUSED]


@pytest.mark.parametrize("world", [2, 4])
def test_split_layers_are_exact_or_refused(world: int) -> None:
    for exact, refused in run_distributed(all_alone, world):
        for case, got in zip(EXACT, exact, strict=True):
            assert not isinstance(got, str), got
            assert_close(got, wanted(Net(*case)))
        for (_, _, said), got in zip(REFUSED, refused, strict=True):
            assert isinstance(got, str) and said in got, got


def draws(rank: int, world: int, poisson: bool) -> list[list[int]]:
    net = Net(*EXACT[0])
    parallelize_module(net, init_device_mesh("cpu", (world,)), plan_of(net))
    made = private(net, "ghost_tp", poisson)
    return [x[:, 0, 0].tolist() for _ in range(4) for x, _ in made[3]]


def test_ranks_that_split_layers_draw_the_same_batches() -> None:
    first, second = run_distributed(draws, 2, True)
    assert first == second and len({len(drawn) for drawn in first}) > 1


def sharded_too(rank: int, world: int, use: Use, without: str, first: int) -> list[Tensor]:
    net = Net(use, without)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], plan_of(net))
    for part in (*net.children(), net):
        fully_shard(part, mesh=mesh["dp"])
    made = private(net, "ghost_fsdp")
    own = slice(first, B) if mesh["dp"].get_local_rank() else slice(first)
    x, y = batch()
    return sums(made, x[own], y[own])


@pytest.mark.parametrize("first", [3, 1, 0])
def test_layers_shared_by_all_samples_are_reduced_beside_split_ones(first: int) -> None:
    for got in run_distributed(sharded_too, 4, *EXACT[2], first):
        assert_close(got, wanted(Net(*EXACT[2])))
