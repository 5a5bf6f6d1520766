"""The ranks that share a model, along the axes of its meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.platform.sharded import is_dtensor
from opacus.core.platform.torch_internals import tensor_parallel_names


@dataclass(frozen=True)
class ModelRanks:
    """The ranks of one model sharded by FSDP2, as this rank sees them.

    Attributes:
        data: Groups along the axes whose ranks may hold different samples (shard, and
            replicate), the last axis first.
        tensor: Groups along the tensor-parallel axes, whose ranks hold the same samples.
        index: Place of this rank among those of the data axes, in rank order.
        count: Number of those.
        device: Where tensors must lie to be communicated.
    """

    data: tuple[dist.ProcessGroup, ...]
    tensor: tuple[dist.ProcessGroup, ...]
    index: int
    count: int
    device: torch.device

    @property
    def copies(self) -> int:
        """Number of ranks that hold each sample: those along the tensor-parallel axes."""
        return math.prod(dist.get_world_size(group) for group in self.tensor)

    def gather(self, values: Tensor) -> Tensor:
        """``[n]`` of each rank of the data axes -> ``[count, n]``, a collective an axis."""
        return _gather(values.unsqueeze(0), self.data)

    def gather_all(self, values: Tensor) -> Tensor:
        """``[n]`` of every rank of the model -> ``[ranks, n]``; of equals, one after another."""
        return _gather(values.unsqueeze(0), (*self.tensor, *self.data))

    def gather_rows(self, values: Tensor, *, all_copies: bool = False) -> Tensor:
        """``[B_r]`` of each rank, of any length, joined in rank order.

        Args:
            values: Of this rank.
            all_copies: Those of all ranks of the model rather than of the data axes alone.
        """
        gather = self.gather_all if all_copies else self.gather
        sizes = gather(torch.tensor([len(values)], device=self.device)).flatten().tolist()
        if not any(sizes):
            return values
        padded = values.new_zeros(max(sizes), device=self.device)
        padded[: len(values)] = values
        rows = gather(padded).to(values.device)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    def gather_text(self, text: str) -> str:
        """What every rank of the model says, joined."""
        letters = torch.tensor(list(text.encode()), dtype=torch.int64, device="cpu")
        return bytes(self.gather_rows(letters, all_copies=True).tolist()).decode()

    def add(self, values: Tensor) -> None:
        """Sum over the data axes, in place."""
        for group in self.data:
            dist.all_reduce(values, group=group)


def ranks_of(model: nn.Module) -> ModelRanks:
    """The ranks of a model all of whose trainable parameters are sharded by FSDP2."""
    split = tensor_parallel_names(model)
    axes: dict[bool, tuple[Any, int]] = {}
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            mesh = parameter.device_mesh
            # Of what is split in both ways, FSDP2 puts the tensor-parallel axis last.
            axes.setdefault(name in split, (mesh, mesh.ndim - (name in split)))
    if not axes:
        world = dist.group.WORLD
        assert world is not None
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        return ModelRanks((world,), (), dist.get_rank(), dist.get_world_size(), device)
    mesh, last = axes[min(axes, key=lambda is_split: is_split)]
    index, count = 0, 1
    for axis in range(last):
        index = index * mesh.size(axis) + mesh.get_local_rank(axis)
        count *= mesh.size(axis)
    data = tuple(mesh.get_group(axis) for axis in reversed(range(last)))
    wide, first = axes.get(True, (mesh, mesh.ndim))
    tensor = tuple(wide.get_group(axis) for axis in range(first, wide.ndim))
    return ModelRanks(data, tensor, index, count, torch.device(mesh.device_type))


def _gather(rows: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows, group=group)
        rows = torch.cat(parts)
    return rows
