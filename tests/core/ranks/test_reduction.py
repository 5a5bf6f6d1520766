"""Clipped sums into the shards of FSDP2's parameters: each rank gets its part of everyone's sum."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from opacus.core.ranks import reduction
from opacus.core.ranks.reduction import ShardedSink
from opacus.core.ranks.shards import Shards, can_reduce, shards_of
from opacus.core.sums import terms as terms_module
from opacus.core.sums.terms import Terms
from tests.helpers.distributed import progress, run_distributed

WORLD, B = 2, 3
# Even, uneven, fewer rows than ranks, and not cut by rows.
SHAPES = {"even": (4, 3), "uneven": (5, 2), "short": (1, 6), "vector": (7,), "columns": (3, 6)}
# Elements of a bucket, those up to which a parameter is small, and how many reductions that makes.
SETTINGS = [(1 << 27, 1 << 16, 1), (1, 0, 5), (1, 1 << 16, 5), (20, 0, 4)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))


def sharded(mesh: Any) -> Net:
    net = Net()
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p is net.columns else None)
    return net


def away(name: str, parameter: Any, dtype: torch.dtype) -> Shards:
    """Shards that wait on another device than the one that sums, as in CPU offload."""
    return replace(shards_of(name, parameter, dtype), home="elsewhere")


def terms_of(rank: int) -> dict[str, Terms]:
    """What a rank sums: stored gradients, later terms, both, or nothing."""
    draw = torch.Generator().manual_seed(rank)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    factors = torch.rand(B, generator=draw, dtype=torch.float64)
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        stored = None if number % 3 == 1 else rows(B, *shape)
        more = [functools.partial(torch.clone, rows(*shape))] if number % 3 else []
        if rank == 1 and name in ("even", "short"):  # took no part there
            stored, more = None, []
        found[name] = Terms(stored, more, factors, None)
    return found


def right(world: int) -> dict[str, Tensor]:
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank in range(world):
        for name, terms in terms_of(rank).items():
            value = terms.value()
            total[name] += 0 if value is None else value
    return total


def job(rank: int, world: int) -> dict[str, Any]:
    """All cases in one set of processes."""
    meshes = {"one axis": init_device_mesh("cpu", (world,))}
    meshes["replicas"] = init_device_mesh("cpu", (world, 1), mesh_dim_names=("same", "cut"))
    found: dict[str, Any] = {}
    for name, mesh in meshes.items():
        for elements, small, reductions in SETTINGS:
            progress((name, elements, small))
            reduction.BUCKET_ELEMENTS = terms_module.BUCKET_ELEMENTS = elements
            reduction.SMALL_ELEMENTS = small
            reduction.shards_of = away if small else shards_of
            net = sharded(mesh)
            sink = ShardedSink(dict(net.named_parameters()), {})
            sink.put("even", Terms(torch.ones(B, 4, 3).double(), [], torch.ones(B).double(), None))
            started = sink.reductions  # a full bucket is on its way
            dist.barrier()
            sink.abandon()
            for again in range(2):  # the second time it is added
                begun = sink.reductions
                for parameter, terms in terms_of(rank).items():
                    sink.put(parameter, terms)
                sink.finish()
                counted = sink.reductions - begun
                grads = {n: p.grad.full_tensor().clone() for n, p in net.named_parameters()}
                found[f"{name} {elements} {small} {again}"] = (grads, counted, reductions, started)
    return found


def test_every_rank_has_its_shard_of_the_sum_of_all() -> None:
    want = right(WORLD)
    alone = terms_of(0)
    assert all(not torch.equal(want[n], alone[n].value()) for n in ("uneven", "vector", "columns"))
    for of_rank in run_distributed(job, WORLD):
        assert len(of_rank) == 2 * 2 * len(SETTINGS)
        for case, (grads, counted, reductions, started) in of_rank.items():
            times = int(case[-1]) + 1
            for name, grad in grads.items():
                torch.testing.assert_close(grad, times * want[name], msg=f"{case} {name}")
            assert counted == reductions and started <= 1, case


def test_which_placements_it_takes() -> None:
    assert can_reduce([Shard(0)]) and can_reduce([Replicate(), Shard(1)])
    for wrong in ([Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(0)], []):
        assert not can_reduce(wrong)
    with pytest.raises(ValueError, match="parameter 'w' has placements"):
        shards_of("w", nn.Parameter(torch.zeros(3)), torch.float32)
