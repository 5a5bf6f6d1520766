"""Ranks that take different numbers of physical batches are refused before one of them releases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

CASES = [
    ("ghost_fsdp_bk", True),
    ("ghost_fsdp_bk", False),
    ("ghost_fsdp", True),
    ("ghost_bk", True),
]


def refused(rank: int, world_size: int) -> None:
    for mode, poisson in CASES:
        progress((mode, poisson))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        model: Any = FSDP2Wrapper(net) if "fsdp" in mode else DistributedDataParallel(net)
        data = TensorDataset(torch.randn(48, 4), torch.randint(2, (48,)))
        engine = PrivacyEngine(accountant="rdp")
        module, optimizer, criterion, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, batch_size=24),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            poisson_sampling=poisson,
        )
        batches = iter(loader)

        def take(parts: int, made: Any = (module, optimizer, criterion, batches)) -> None:
            module, optimizer, criterion, batches = made
            x, y = next(batches)
            pairs = zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
            for place, (inputs, targets) in enumerate(pairs):
                optimizer.signal_skip_step(place < parts - 1)
                optimizer.zero_grad()
                criterion(module(inputs), targets).backward()
                optimizer.step()

        take(2)
        with pytest.raises(RuntimeError, match="ranks take different numbers of physical batches"):
            take(2 + rank)
        assert len(engine.accountant) == 1


def test_nothing_is_released() -> None:
    run_distributed(refused, 2)
