"""A step fails on all ranks of a sharded model: the next one is that of a fresh model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.distributed import attempt, run_distributed
from tests.helpers.failures import (
    OF_ALL,
    OF_GHOST,
    OF_RULES,
    B,
    Training,
    batch,
    build,
    failing,
    want,
)

FSDP = ["ghost_fsdp", "flash_fsdp", "ghost_fsdp_bk", "flash_fsdp_bk"]
PLACES = [place for place in OF_ALL + OF_RULES + OF_GHOST if place != "interrupted"]


def train(mode: str, world_size: int) -> Training:
    net: nn.Module = build()
    if mode in FSDP:
        net = FSDP2Wrapper(net)
    else:
        split = {"first": ColwiseParallel(output_layouts=Replicate())}
        net = parallelize_module(net, init_device_mesh("cpu", (world_size,)), split)
    loader = DataLoader(TensorDataset(*batch(9, 4 * B)), batch_size=2 * B)
    return Training(mode, net, data_loader=loader)


def good_step(training: Training, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    training.step(data)
    grads: list[Any] = [p.grad for p in training.net.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]


def fails_and_goes_on(
    mode: str, place: str, rank: int, world_size: int
) -> tuple[int, list[Tensor]]:
    training = train(mode, world_size)
    own = rank if mode in FSDP else 0
    with failing(place), pytest.raises(Exception) as caught:
        training.step(batch(10 + own))
    assert not isinstance(caught.value, (AssertionError, AttributeError)), caught.value
    training.optimizer.zero_grad()
    assert training.steps == 0
    sums = good_step(training, batch(20 + own))
    fresh = good_step(train(mode, world_size), batch(20 + own))
    assert all(map(torch.equal, sums, fresh))
    assert training.model.isolation.schedule.checks == 1  # of a batch that was in order
    return training.steps, sums


def every_case(rank: int, world_size: int, modes: list[str]) -> dict[Any, Any]:
    return {
        (mode, place): attempt(fails_and_goes_on, mode, place, rank, world_size)
        for mode in modes
        for place in PLACES
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_next_step_of_fsdp2(world_size: int) -> None:
    parts = zip(*(batch(20 + rank) for rank in range(world_size)), strict=True)
    x, y = (torch.cat(part) for part in parts)
    check(run_distributed(every_case, world_size, FSDP[:: world_size // 2]), want(build(), (x, y)))


def test_the_next_step_of_tensor_parallelism() -> None:
    check(run_distributed(every_case, 2, ["ghost_tp"]), want(build(), batch(20)))


def check(ranks: list[dict[Any, Any]], exact: list[Tensor]) -> None:
    failed = {case: text for one in ranks for case, text in one.items() if isinstance(text, str)}
    assert not failed, "\n".join(f"{case}: {text}" for case, text in failed.items())
    for one in ranks:
        for case, (steps, sums) in one.items():
            assert steps == 1, case
            for got, total in zip(sums, exact, strict=True):
                assert oracle.relative_error(got, total) < 1e-5, case
