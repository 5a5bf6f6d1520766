"""How models are spread over ranks, private and non-private alike."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memory_test.benchmarks.cases import Suite
from memory_test.benchmarks.ways import Way
from memory_test.common.failures import UsageError
from memory_test.common.launch import Runtime

TP_RANKS = 2
# Layers of a Llama block by what is split: outputs or inputs.
SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
SPLIT_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class DataRank:
    """Which samples a rank has: number ``rank`` of ``count`` parts."""

    rank: int
    count: int


def data_rank(suite: Suite, runtime: Runtime) -> DataRank:
    """Ranks that share layers have the same samples."""
    sharers = TP_RANKS if suite.wrapping == "tp" else 1
    return DataRank(runtime.rank // sharers, runtime.world_size // sharers)


def check_ranks(suite: Suite, world: int) -> None:
    """Raise a :class:`UsageError` if the model cannot be spread over so many ranks."""
    halves = suite.wrapping in ("hsdp", "tp")
    if halves and world % 2:
        raise UsageError(f"--wrapping {suite.wrapping}: an even number of ranks, not {world}")


def sharded(
    model: nn.Module, suite: Suite, way: Way, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """``model``, sharded by FSDP2 as ``suite`` and ``way`` say.

    Raises:
        UsageError: Not this model.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    half = dtype if dtype is not torch.float32 else None
    cuda = device.type == "cuda"
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    }
    if way.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=cuda)
    if suite.half:
        model = model.to(dtype)
    if suite.wrapping == "hsdp":
        options["mesh"] = _mesh(device.type, (2, -1), ("replicate", "shard"))
    if suite.wrapping == "tp":
        options["mesh"] = _split(model, device.type)
    if way.private:
        from opacus.utils.fsdp_utils import FSDP2Wrapper

        leaves = {"use_block_wrapping": False, "wrap_individual_layers": True}
        return FSDP2Wrapper(model, **options, **(leaves if suite.wrapping == "leaves" else {}))
    # No code of the package, which could slow what it is compared with.
    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def copies_of(parameter: Any, runtime: Runtime) -> int:
    """How many ranks hold the same part of a sharded parameter."""
    parts = 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return runtime.world_size // parts


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks: members of the outermost module lists."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


def _split(model: nn.Module, kind: str) -> Any:
    """Split the layers of a Llama's blocks over pairs of ranks; the mesh of FSDP2."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    found = [block for block in blocks(model) if hasattr(block, "self_attn")]
    if not found:
        raise UsageError("--wrapping tp: only Llama shapes are split, such as tiny-llama")
    mesh = _mesh(kind, (-1, TP_RANKS), ("dp", "tp"))
    for block in found:
        for name, layer in block.named_modules():
            kinds = {**dict.fromkeys(SPLIT_OUTPUTS, ColwiseParallel),
                     **dict.fromkeys(SPLIT_INPUTS, RowwiseParallel)}  # fmt: skip
            style = kinds.get(name.rpartition(".")[2])
            if style is not None and isinstance(layer, nn.Linear):
                parallelize_module(layer, mesh["tp"], style())
    return mesh["dp"]


@functools.cache  # each mesh has groups of ranks of its own
def _mesh(kind: str, shape: tuple[int, int], names: tuple[str, str]) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rest = dist.get_world_size() // max(shape)
    sizes = tuple(rest if size < 0 else size for size in shape)
    return init_device_mesh(kind, sizes, mesh_dim_names=names)


class Adapted(nn.Module):
    """A frozen layer with a trainable adapter of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **place)
        # Not zero: else half of the adapters would have no gradient, nothing to check.
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **place)
        if not self.lora_B.weight.is_meta:  # only counted
            nn.init.normal_(self.lora_B.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer and its adapter give."""
        result: torch.Tensor = self.base(x) + 2.0 * self.lora_B(self.lora_A(x))
        return result


def adapt(model: nn.Module, rank: int, names: Collection[str] | None = None) -> None:
    """Freeze ``model`` but for adapters of the linear layers of its blocks.

    Args:
        model: It is changed.
        rank: Of the adapters.
        names: Last parts of the layers' names; ``None``: all layers.
    """
    model.requires_grad_(False)
    for block in blocks(model):
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear) and (names is None or name in names):
                    setattr(parent, name, Adapted(layer, rank))
