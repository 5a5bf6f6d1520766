"""Numbers of which all ranks need the least: of shards, then of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opacus.core.ranks.asked import Asked
from opacus.core.ranks.reduction import ShardedSink
from tests.helpers.distributed import run_distributed

# What each of four ranks may hold; the least is on another shard and another replica than rank 0.
NUMBERS = (9, 8, 7, 3)


def test_a_rank_alone_hears_itself() -> None:
    assert Asked([5, -2, 1 << 62], [], torch.device("cpu")).least() == [5, -2, 1 << 62]


@pytest.mark.gpu
def test_an_answer_is_read_on_the_host() -> None:
    with torch.device("cuda"):
        assert Asked([4, 2], [], torch.device("cuda", 0)).least() == [4, 2]


def job(rank: int, world: int) -> dict[str, Any]:
    names = {"mesh_dim_names": ("same", "cut")}
    meshes = {"one axis": init_device_mesh("cpu", (world,))}
    meshes["replicas"] = init_device_mesh("cpu", (2, world // 2), **names)
    found: dict[str, Any] = {}
    for name, mesh in meshes.items():
        net = nn.Linear(4, 4)
        fully_shard(net, mesh=mesh)
        sink = ShardedSink(dict(net.named_parameters()), {})
        sink.unreduced.wanted = True
        sink._has_room = lambda: rank != world - 1  # type: ignore[method-assign]
        heard = []
        for replays in (False, rank == world - 1):
            sink.ask(replays, [NUMBERS[rank], 100 + rank])
            heard.append(sink.hear())
        alone = [dist.get_world_size(group) for group in sink._groups]
        found[name] = (heard, sink.holding, sink.questions, sorted(alone))
    return found


def test_all_ranks_hear_the_least_of_all() -> None:
    groups = {"one axis": [4], "replicas": [2, 2]}
    for of_rank in run_distributed(job, 4):
        for name, found in of_rank.items():
            heard = [(False, [3, 100]), (True, [3, 100])]
            # One rank has no room for sums that wait, so they wait on none.
            assert found == (heard, False, 2, groups[name]), name
