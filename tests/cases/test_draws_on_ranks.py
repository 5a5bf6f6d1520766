"""One rank has another batch than it drew: no rank releases the step, none waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

N = 12
MODES = ["ghost_fsdp", "ghost_fsdp_bk", "hooks", "ghost_bk"]


def run(rank: int, mode: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    net = FSDP2Wrapper(plain) if "fsdp" in mode else DistributedDataParallel(plain)
    engine = PrivacyEngine()
    made = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.randn(N, 4), torch.arange(N) % 3), batch_size=N),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()

    def weights() -> torch.Tensor:
        parts = [p.detach() for p in net.parameters()]
        return torch.cat([(p.full_tensor() if "fsdp" in mode else p).flatten() for p in parts])

    found: dict[str, Any] = {"said": [], "moved": [], "steps": []}
    for number in range(3):
        x, y = next(iter(loader))
        if (number, rank) == (1, 1):
            x, y = x[1:], y[1:]
        before = weights()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        try:
            optimizer.step()
            found["said"].append("")
        except RuntimeError as error:
            found["said"].append(str(error))
        found["moved"].append(bool((weights() != before).any()))
        found["steps"].append(sum(count for _, _, count in engine.accountant.history))
    return found


def cases(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for mode in MODES:
        progress(mode)
        found[mode] = run(rank, mode)
    return found


def test_no_rank_releases_what_one_refuses() -> None:
    ranks = run_distributed(cases, 2)
    for mode in MODES:
        for rank, found in enumerate(one[mode] for one in ranks):
            first, second, third = found["said"]
            assert (first, third) == ("", ""), (mode, first, third)
            refused = "drew 6 items for this batch, but the step saw 5 samples"
            assert refused in second, (mode, rank, second)
            assert ("rank 1 refused its batch" in second) == (rank == 0)
            assert found["moved"] == [True, False, True], (mode, rank)
            assert found["steps"] == [1, 1, 2]
