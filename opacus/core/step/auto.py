"""The choice of ``grad_sample_mode="auto"``: the fastest mode that is sound for a model.

All rules are in :func:`choose_mode`, a function of :class:`Facts` alone. The facts are the same
on all ranks of a job whose hosts are alike; ``make_private`` compares the choices and refuses
on all ranks if they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from opacus.core.kernels.host.operands import triton_is_installed
from opacus.core.platform.sharded import compute_device, is_dtensor, is_fsdp
from opacus.core.platform.sizes import STORED_SHARE
from opacus.core.platform.torch_internals import compute_dtypes, tensor_parallel_names
from opacus.core.ranks.shards import can_reduce
from opacus.core.step.modes import MODES, Mode


@dataclass(frozen=True)
class Facts:
    """The facts that the choice depends on.

    Attributes:
        sharded: Some module is sharded by FSDP2.
        split: Some parameter is split, or replicated, by tensor parallelism.
        reducible: Single-backward modes can reduce every sharded trainable parameter.
        clipping: As given to ``make_private``.
        device: Type of the device that computes, ``"cuda"`` or another.
        triton: Triton is installed.
        checkpointed: Activations are visibly recomputed in the backward pass.
        sample_bytes: Size of the per-sample gradients of one sample, unsharded.
        device_bytes: Memory of the device; ``None``: not known, no limit.
    """

    sharded: bool = False
    split: bool = False
    reducible: bool = True
    clipping: str = "flat"
    device: str = "cpu"
    triton: bool = False
    checkpointed: bool = False
    sample_bytes: int = 0
    device_bytes: int | None = None


class ChosenMode(NamedTuple):
    """A mode, and why."""

    mode: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = (f"  - {reason}" for reason in self.reasons)
        return "\n".join([f"grad_sample_mode='auto' chose {self.mode!r}:", *lines])


def choose_mode(facts: Facts) -> ChosenMode:
    """The fastest mode that is sound.

    Args:
        facts: See :func:`facts_of`.

    Raises:
        ValueError: No mode does this.
    """
    if facts.clipping == "adaptive":
        return _adaptive(facts)
    if facts.split and not facts.sharded:
        why = "layers are split by tensor parallelism, for which there is this mode only"
        return ChosenMode("ghost_tp", (why,))
    obstacle = _obstacle(facts)
    kernels, why_kernels = _kernels(facts, one_pass=obstacle is None)
    mode = Mode(
        strategy="one_pass" if obstacle is None else "two_pass",
        kernels="flash" if kernels else "reference",
        parallelism="fsdp" if facts.sharded else "any",
    )
    passes = "one backward pass: the planner keeps what the clipped sum needs of each layer"
    reasons = (
        "the model is sharded by FSDP2" if facts.sharded else "the model is not sharded",
        passes if obstacle is None else f"two backward passes: {obstacle}",
        why_kernels,
    )
    return ChosenMode(next(name for name, known in MODES.items() if known == mode), reasons)


def _adaptive(facts: Facts) -> ChosenMode:
    if facts.sharded or facts.split:
        raise ValueError(
            "clipping='adaptive' works on models that are not sharded: use "
            "opacus.utils.adaptive_clipping.PrivacyEngineAdaptiveClipping with clipping='flat'"
        )
    why = "clipping='adaptive' needs all per-sample gradients in the optimizer"
    return ChosenMode("hooks", (why,))


def _obstacle(facts: Facts) -> str | None:
    """The reason against a single backward pass, if there is one."""
    if facts.sharded and not facts.reducible:
        return (
            "parameters are sharded along more than one axis of a mesh, which the single-backward "
            "modes cannot reduce"
        )
    limit = facts.device_bytes
    if facts.checkpointed and limit is not None and facts.sample_bytes > STORED_SHARE * limit:
        # Stored gradients do not fit; keeping activations would undo the checkpointing.
        return (
            f"activations are checkpointed, and the gradients of a single sample "
            f"({facts.sample_bytes / 2**30:.0f} GB) take more than half of the device's "
            f"{limit / 2**30:.0f} GB, so a single one would have to keep all activations"
        )
    return None


def _kernels(facts: Facts, one_pass: bool) -> tuple[bool, str]:
    if facts.device != "cuda":
        return False, f"norms by PyTorch: the parameters are on {facts.device!r}, not on a GPU"
    if not facts.triton:
        return False, "norms by PyTorch: Triton is not installed"
    if facts.sharded and one_pass:
        # Measured: memory_test/results/llama3-1b_h200x2_2026-11-28_series.json.
        return False, (
            "norms by PyTorch: most come from the gradients that are formed for the sum, and "
            "launching Triton kernels for the rest takes the host longer"
        )
    return True, "norms by Triton kernels or by PyTorch, whichever is faster for each size"


# --- the facts of a model ---


def facts_of(module: nn.Module, clipping: str = "flat") -> Facts:
    """What :func:`choose_mode` has to know; reads the model, changes and communicates nothing.

    Args:
        module: The model, wrapped and on its device.
        clipping: As given to ``make_private``.
    """
    parameters = list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    sharded = any(is_fsdp(m) for m in module.modules())
    used = trainable or parameters
    device = compute_device(used[0]) if used else torch.device("cpu")
    return Facts(
        sharded=sharded,
        split=bool(tensor_parallel_names(module))
        if sharded
        else any(is_dtensor(p) for p in parameters),
        reducible=not sharded or _is_reducible(module, trainable),
        clipping=clipping,
        device=device.type,
        triton=triton_is_installed(),
        checkpointed=_is_checkpointed(module),
        sample_bytes=_sample_bytes(module),
        device_bytes=_memory_of(device),
    )


def chosen_for(module: nn.Module, clipping: str = "flat") -> ChosenMode:
    """:func:`choose_mode` of the :func:`facts_of` a model."""
    return choose_mode(facts_of(module, clipping))


def _memory_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def _sample_bytes(module: nn.Module) -> int:
    """Of the per-sample gradients of one sample, in the types that the layers compute in."""
    computed = compute_dtypes(module)
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return sum(p.numel() * computed.get(n, p.dtype).itemsize for n, p in trainable)


def _is_reducible(module: nn.Module, trainable: Sequence[nn.Parameter]) -> bool:
    places = {tuple(p.placements) for p in trainable if is_dtensor(p)}
    return not tensor_parallel_names(module) and all(can_reduce(p) for p in places)


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether transformers' switch is on, or torch's ``checkpoint_wrapper`` was used."""
    known = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    wrapper = getattr(known, "CheckpointWrapper", ())
    return any(
        getattr(m, "gradient_checkpointing", False) is True or isinstance(m, wrapper)
        for m in module.modules()
    )
