"""How parameters that FSDP2 shards lie on the ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.core.platform.sharded import is_dtensor, local_of, locals_of
from opacus.core.platform.torch_internals import all_sharded, parts_like
from opacus.core.sums.terms import add_to_grad


@dataclass(frozen=True)
class Shards:
    """How a parameter lies on the ranks.

    Attributes:
        group: Ranks that hold its different shards.
        replicas: Ranks that hold the same shard (HSDP), or ``None``.
        world: Number of shards W.
        dim: Dimension that is cut.
        size: Elements of the largest shard, which all are padded to.
        dtype: Type in which gradients are summed.
        home: Kind of device that the shards wait on: the CPU's under ``CPUOffloadPolicy``.
        even: Whether the whole is the shards one after another, without padding.
    """

    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    world: int
    dim: int
    size: int
    dtype: torch.dtype
    home: str
    even: bool

    @cached_property
    def elements(self) -> int:
        """Elements of the padded whole."""
        return self.world * self.size

    @cached_property
    def reduction(self) -> Hashable:
        """Equal for parameters that can be reduced together."""
        return self.group, self.replicas, self.dtype, self.home


def add_shards(parameters: Sequence[Any], flat: Tensor, sizes: Sequence[int]) -> None:
    """Add to the gradients of sharded parameters.

    Args:
        parameters: Sharded by FSDP2.
        flat: So many elements for each, one after the other, which start with this rank's shard of
            what is added.
        sizes: How many.
    """
    locals_ = locals_of(parameters)
    own = [local.numel() for local in locals_]
    if own == list(sizes):
        shards = parts_like(flat, locals_)
    else:
        parts = zip(flat.split_with_sizes(list(sizes)), own, locals_, strict=True)
        shards = [part[:size].view(local.shape) for part, size, local in parts]
    shards = [
        s if s.dtype == local.dtype and s.device == local.device else s.to(local)
        for s, local in zip(shards, locals_, strict=True)
    ]
    for parameter, grad in zip(parameters, all_sharded(shards, parameters), strict=True):
        add_to_grad(parameter, grad)


def can_reduce(placements: Sequence[Any]) -> bool:
    """Whether ranks can reduce it without FSDP2: sharded on one axis, the last of one or two."""
    axes = [axis for axis, place in enumerate(placements) if place.is_shard()]
    return axes == [len(placements) - 1] and len(placements) <= 2


def shards_of(name: str, parameter: Any, dtype: torch.dtype) -> Shards:
    """How ``parameter`` lies on the ranks.

    Raises:
        ValueError: It is not sharded along exactly one mesh axis, the last one.
    """
    places = parameter.placements if is_dtensor(parameter) else ()
    if not can_reduce(places):
        raise ValueError(
            f"parameter '{name}' has placements {places}: the *_fsdp_bk modes need FSDP2 on a "
            "mesh with one axis, or (replicate, shard). Use the mode without _bk"
        )
    mesh, axis = parameter.device_mesh, len(places) - 1
    dim = getattr(places[axis], "dim", 0)
    world = mesh.size(axis)
    rows = -(-parameter.shape[dim] // world)
    rest = parameter.numel() // max(1, parameter.shape[dim])
    wide = torch.float64 if parameter.dtype == torch.float64 else dtype
    size = rows * rest
    return Shards(
        group=mesh.get_group(axis),
        replicas=mesh.get_group(0) if axis else None,
        world=world,
        dim=dim,
        size=size,
        dtype=wide,
        home=local_of(parameter).device.type,
        even=dim == 0 and world * size == parameter.numel(),
    )
