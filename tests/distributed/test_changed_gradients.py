"""FSDP2: clipped sums in sharded gradients may be read, unscaled, but not changed before the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

MODES = ["ghost_fsdp", "ghost_fsdp_bk"]


def clip(parameters: list[Any]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)


def clip_one_by_one(parameters: list[Any]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.05, foreach=False)


def multiply(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad *= 8


def multiply_shards(parameters: list[Any]) -> None:
    with torch.no_grad():
        torch._foreach_mul_([p.grad.to_local() for p in parameters], 8.0)


def read(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad.full_tensor().norm()


def train(rank: int, mode: str, change: Any, scaled: bool) -> tuple[str, float]:
    torch.manual_seed(0)
    net = FSDP2Wrapper(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    amp = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    inputs, targets = torch.randn(4, 4) + rank, torch.randint(0, 3, (4,))
    for _ in range(2):
        optimizer.zero_grad()
        amp.scale(criterion(model(inputs), targets)).backward()
        if scaled:
            amp.unscale_(optimizer)
        change(list(net.parameters()))
        try:
            amp.step(optimizer)
        except RuntimeError as error:
            return str(error), 0.0
        amp.update()
    return "", sum(p.grad.full_tensor().norm().item() for p in net.parameters())


def cases(rank: int, world_size: int) -> list[tuple[str, str, bool, str, float]]:
    found = []
    for mode in MODES:
        for change in (clip, clip_one_by_one, multiply, multiply_shards, read):
            for scaled in (False, True):
                progress((mode, change.__name__, scaled))
                found.append((mode, change.__name__, scaled, *train(rank, mode, change, scaled)))
    return found


def test_changes_are_refused_and_reading_is_not() -> None:
    for found in run_distributed(cases, 2):
        norms: dict[str, list[float]] = {}
        for mode, change, scaled, said, norm in found:
            if change == "read":
                assert said == "" and norm > 0, (mode, scaled, said)
                norms.setdefault(mode, []).append(norm)
            else:
                assert "changed or added between backward() and step()" in said, (mode, change)
        for plain, unscaled in norms.values():
            assert abs(unscaled / plain - 1) < 1e-4
