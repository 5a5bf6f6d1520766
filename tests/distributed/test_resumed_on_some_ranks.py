"""A state that only some ranks load: replicas must not get different noise without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from tests.helpers.distributed import run_distributed

REFUSED = "the noise of another step ({0: '4', 1: '0'} by rank)"


class Run:
    def __init__(self, seed: int | None) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)
        data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
        module = DifferentiallyPrivateDistributedDataParallel(self.net)
        self.engine = PrivacyEngine(accountant="rdp")
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            noise_generator=None if seed is None else torch.Generator().manual_seed(seed),
        )

    def train(self) -> Tensor:
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.module(inputs), targets).backward()
            self.optimizer.step()
        return self.net.weight.detach().clone()


def job(rank: int, world_size: int, folder: str, seed: int | None, alone: bool) -> Any:
    first, run = Run(seed), Run(seed)
    first.train()
    parts = {"module": run.module, "optimizer": run.optimizer}
    first.engine.save_checkpoint(
        path=f"{folder}/{rank}.pt", module=first.module, optimizer=first.optimizer
    )
    if rank == 0 and alone:
        run.engine.accountant.load_state_dict(first.engine.accountant.state_dict())
    elif rank == 0:
        run.engine.load_checkpoint(path=f"{folder}/0.pt", **parts)
    before = run.net.weight.detach().clone()
    try:
        return run.train()
    except RuntimeError as error:
        assert torch.equal(run.net.weight, before)
        return str(error)


@pytest.mark.parametrize(("seed", "alone"), [(None, False), (5, False), (5, True)])
def test_it_is_refused_on_all(tmp_path: Any, seed: int | None, alone: bool) -> None:
    for error in run_distributed(job, 2, str(tmp_path), seed, alone):
        assert REFUSED in error


def test_an_accountant_that_one_rank_has_changes_no_noise_without_a_seed(tmp_path: Any) -> None:
    first, second = run_distributed(job, 2, str(tmp_path), None, True)
    assert torch.equal(first, second)
