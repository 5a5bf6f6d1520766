"""A physical batch that the training loop of one rank leaves out: the ranks go on together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.ranks.votes import Votes
from opacus.utils.batch_memory_manager import BatchMemoryManager
from tests.helpers.distributed import attempt, run_distributed

N = 24  # two logical batches of three parts on each of two ranks
LEFT = ["before", "backward", "after"]


def full(grad: Any) -> None:
    raise MemoryError


def one_part(made: Any, criterion: Any, x: Any, leave: str | None) -> None:
    _, model, optimizer = made
    optimizer.zero_grad()
    if leave == "before":
        return
    output = model(x)
    if leave == "backward":
        output.register_hook(full)
    criterion(output, torch.full_like(output, -1000.0)).backward()
    if leave is None:
        optimizer.step()


def released(rank: int, world_size: int, mode: str, leave: str, part: int) -> list[list[int]]:
    """The items in each step of two passes; rank 0 leaves a part of the first batch."""
    Votes.WAIT = 20.0
    torch.manual_seed(0)
    net = nn.Linear(N, 1, bias=False)
    engine = PrivacyEngine()
    model, optimizer, *given, loader = engine.make_private(
        module=DistributedDataParallel(net),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.L1Loss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(torch.eye(N)), batch_size=N // 2),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode,
    )
    found: list[list[int]] = []
    optimizer.attach_step_hook(lambda _: found.append(net.weight.grad[0].nonzero()[:, 0].tolist()))
    made, criterion = (engine, model, optimizer), (*given, nn.L1Loss(reduction="sum"))[0]
    for number in range(2):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as batches:
            for k, (x,) in enumerate(batches):
                left = rank == 0 and (number, k) == (0, part)
                try:
                    one_part(made, criterion, x, leave if left else None)
                except (RuntimeError, MemoryError):
                    optimizer.zero_grad()
    return found


def all_ways(rank: int, world_size: int, mode: str) -> dict[str, Any]:
    return {
        (leave, part): attempt(released, rank, world_size, mode, leave, part)
        for leave in LEFT
        for part in (1, 2)
    }


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_only_the_batch_of_the_part_is_lost(mode: str) -> None:
    first, second = [*range(N // 2)], [*range(N // 2, N)]
    for found in run_distributed(all_ways, 2, mode, timeout=120):
        assert set(map(str, found.values())) == {str([second, first, second])}
