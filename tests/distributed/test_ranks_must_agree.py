"""Ranks that were told different things of one run: refused on all of them, replicated or sharded.

They would count other steps than those that were taken, clip more loosely than the noise is made
for, or deal out the data in different ways, so that two ranks draw the same item.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

# How the model is spread, and the modes for that.
WAYS: dict[str, tuple[Any, str]] = {
    "ours": (DifferentiallyPrivateDistributedDataParallel, "ghost_bk"),
    "ours, hooks": (DifferentiallyPrivateDistributedDataParallel, "hooks"),
    "torch's": (DistributedDataParallel, "hooks"),
    "sharded": (FSDP2Wrapper, "ghost_fsdp_bk"),
}
# What rank 0 and rank 1 are told, and what both say of it.
TOLD: dict[str, tuple[tuple[Any, Any], str]] = {
    "items": ((8, 6), r"number of items of data_loader.dataset.*\(by rank\): \['8', '6'\]"),
    "batch_size": ((4, 2), r"the sample rate of data_loader \(by rank\): \['0.5', '0.25'\]"),
    "max_grad_norm": ((1.0, 2.0), r"max_grad_norm \(by rank\): \['1.0', '2.0'\]"),
    "noise_multiplier": ((1.0, 0.5), r"noise_multiplier \(by rank\): \['1.0', '0.5'\]"),
}


def made(way: str, **told: Any) -> str:
    spread, mode = WAYS[way]
    torch.manual_seed(0)
    net = spread(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    items, size = told.pop("items", 8), told.pop("batch_size", 4)
    try:
        PrivacyEngine().make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(torch.zeros(items, 5)), batch_size=size),
            criterion=nn.CrossEntropyLoss(), grad_sample_mode=mode,
            **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **told},
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return "made"


def job(rank: int, world_size: int) -> dict[tuple[str, str], str]:
    said = {}
    for way in WAYS:
        progress(way)
        said[way, "the same"] = made(way)
        for name, (values, _) in TOLD.items():
            said[way, name] = made(way, **{name: values[rank]})
    return said


@functools.cache
def said() -> list[dict[tuple[str, str], str]]:
    return run_distributed(job, 2)


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("way", WAYS)
def test_what_differs_is_refused_by_name(way: str, name: str) -> None:
    for of_rank in said():
        assert re.search("ranks must agree.*" + TOLD[name][1], of_rank[way, name])


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_agree(way: str) -> None:
    assert [of_rank[way, "the same"] for of_rank in said()] == ["made", "made"]
