"""Where a Trainer's model is: in one process, replicated (DDP), or sharded (FSDP2).

Accelerate would wrap the model too, but in DDP that sums gradients before they are clipped, or
after the hooks have been attached. So the model is placed here, before it becomes private.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from opacus.core.platform.sharded import is_fsdp
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper, blocks_of


def plugin_of(accelerator: Any, args: Any) -> Any:
    """Settings of FSDP, if it is asked for; ``None`` if not.

    On CPUs accelerate leaves its plugin out, and falls back to DDP without a word.

    Args:
        accelerator: Of the Trainer; ``accelerate launch`` may have asked for FSDP.
        args: ``TrainingArguments``.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    settings = getattr(args, "fsdp_plugin_args", None)
    return SimpleNamespace(**settings) if plugin is None and settings else plugin


def refuse_plugin(plugin: Any) -> None:
    """Refuse what of accelerate's FSDP plugin is not done here.

    Raises:
        ValueError: It names the setting.
    """
    if plugin is None:
        return
    if getattr(plugin, "fsdp_version", 2) != 2:
        raise ValueError(
            "fsdp_version=1 flattens parameters, so that layers cannot be told apart: set "
            "fsdp_config={'version': 2}"
        )
    if getattr(plugin, "cpu_ram_efficient_loading", False):
        raise ValueError(
            "cpu_ram_efficient_loading=True loads weights in the first process alone, and each "
            "process shards its own copy: set fsdp_config={'cpu_ram_efficient_loading': False} "
            "(fsdp_cpu_ram_efficient_loading: false for accelerate launch)"
        )
    if getattr(plugin, "activation_checkpointing", False):
        raise ValueError(
            "fsdp_config activation_checkpointing=True is not supported: set "
            "gradient_checkpointing=True in TrainingArguments instead"
        )


def _offloads(plugin: Any) -> bool:
    """Whether shards wait on the CPU: ``True``, or FSDP2's policy of that kind."""
    setting = getattr(plugin, "cpu_offload", None)
    return setting is True or isinstance(setting, CPUOffloadPolicy)


def compile_blocks(model: nn.Module, backend: str, mode: str | None) -> None:
    """Compile the model a transformer block at a time; its states keep their names."""
    for block in blocks_of(model):
        if block._compiled_call_impl is None:
            block.compile(backend=backend, mode=mode)


def placed(model: nn.Module, plugin: Any, device: torch.device, bf16: bool) -> nn.Module:
    """The model as it runs; a collective call with several processes.

    Args:
        model: On its device, or on the CPU if it is to be sharded. It is sharded in place.
        plugin: Accelerate's plugin for FSDP; ``None``: replicate it.
        device: Of this process.
        bf16: A sharded model computes in bf16; its parameters stay what they are.
    """
    if is_fsdp(model):  # by FSDP2Wrapper, or by an earlier call
        return model
    if plugin is not None:
        return _sharded(model, plugin, device, bf16)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return DifferentiallyPrivateDistributedDataParallel(model)
    return model


def reshard(model: nn.Module) -> None:
    """Let a model have its shards as parameters, also where it has run without gradients before.

    FSDP2 leaves the root unsharded after that, and an optimizer would be given what is not trained.
    """
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()


def _sharded(model: nn.Module, plugin: Any, device: torch.device, bf16: bool) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy: dict[str, Any] = {"mp_policy": half} if bf16 else {}
    if _offloads(plugin):
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    reshard = getattr(plugin, "reshard_after_forward", True)
    return FSDP2Wrapper(model, mesh=mesh, reshard_after_forward=bool(reshard), **policy)
