"""Recognises sharded modules and tensors without importing torch.distributed's classes.

Importing them takes half a second; a program that shards anything has done so already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_split(kinds: Iterable[type]) -> bool:
    """Whether any of these classes of tensors is one of :func:`part_of`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(k, (module.DTensor, _waiting())) for k in kinds)


def part_of(tensor: Any) -> Any:
    """The memory of a DTensor on this rank, or of a result of communication under way."""
    local = local_of(tensor)
    return local.elem if is_split([type(local)]) else local


def _waiting() -> Any:
    return sys.modules["torch.distributed._functional_collectives"].AsyncCollectiveTensor


def local_of(tensor: Any) -> Any:
    """This rank's shard of a DTensor, without a gradient of its own; another tensor as it is.

    Not by ``to_local()``, which records an operation for autograd and takes ten times as long.
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def compute_device(tensor: Any) -> torch.device:
    """Where a tensor is computed with; under ``CPUOffloadPolicy`` it waits on the CPU."""
    if is_dtensor(tensor) and tensor.device_mesh.device_type != tensor.device.type:
        return torch.device(tensor.device_mesh.device_type)
    device: torch.device = tensor.device
    return device


def locals_of(tensors: Iterable[Any]) -> list[Any]:
    """:func:`local_of` each."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return list(tensors)
    kind = module.DTensor  # asked for once: there are hundreds of tensors, several times a step
    return [t._local_tensor if isinstance(t, kind) else t for t in tensors]


def compute_devices(tensors: Iterable[Any]) -> list[torch.device]:
    """:func:`compute_device` of each."""
    return [compute_device(tensor) for tensor in tensors]


def is_fsdp(module: Any) -> TypeGuard[FSDPModule]:
    """Whether ``fully_shard`` was applied to a module."""
    return is_fsdp_class(type(module))


def is_fsdp_class(kind: type) -> bool:
    """Whether a class is FSDP2's base class or one that ``fully_shard`` made."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and issubclass(kind, module.FSDPModule)
