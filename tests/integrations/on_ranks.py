"""Trainers on several ranks."""

from __future__ import annotations

import os
from typing import Any

import torch

WAYS = {
    "ddp": {}, "wrapped": {}, "fsdp": {"fsdp": True, "fsdp_config": {"version": 2}},
    "offloaded": {"fsdp": True, "fsdp_config": {"version": 2, "cpu_offload": True}},
}  # fmt: skip


def become_rank(rank: int, world_size: int) -> None:
    """What torchrun sets; the process group is there already."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599",
    }  # fmt: skip


def with_plugin(trainer: Any) -> None:
    """What accelerate sets on GPUs for FSDP2; on CPUs it leaves its plugin out without a word."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Unsharded parameters."""
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    return {n: p.detach().clone() for n, p in full.items()}
