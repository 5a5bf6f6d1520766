"""Sharding a model with FSDP2, a transformer block at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from opacus.core.platform.sharded import is_fsdp
from opacus.core.record.blocks import blocks_of

logger = logging.getLogger(__name__)


def has_params(module: nn.Module) -> bool:
    """Whether the module itself, without its children, owns parameters."""
    return next(module.parameters(recurse=False), None) is not None


def iterate_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Modules below ``module``, itself included, that own parameters; children last."""
    for submodule in module.modules():
        if has_params(submodule):
            yield submodule


def FSDP2Wrapper(model: nn.Module, **kwargs: Any) -> nn.Module:  # noqa: N802 (Opacus' name)
    """Shard ``model`` in place with FSDP2, ready for the ``_fsdp`` modes.

    A transformer block is one unit, which communicates once a block. Blocks are the
    classes that a Hugging Face model lists in ``_no_split_modules``, else the members
    of the outermost ``nn.ModuleList`` s. Sharding every layer by itself, as Opacus
    does, makes even a non-private step about three times slower. Frozen weights of a
    quantised type that FSDP2 cannot split (torchao's int8) stay whole on each rank.

    Args:
        model: The model; it is changed and returned.
        mesh: Device mesh, one-dimensional or (replicate, shard).
        mp_policy: ``MixedPrecisionPolicy`` of all units.
        opacus_high_precision_layers: Layer class, or list or tuple of them, that
            computes in fp32 whatever ``mp_policy`` says.
        reshard_after_forward: As in ``fully_shard``; the root stays unsharded.
        use_block_wrapping: Make each block a unit (default).
        wrap_individual_layers: Make each layer with parameters a unit. A layer that shows
            parameters of its own parts under other names (``DPLSTM``) is one unit.
        kwargs: Other arguments of ``fully_shard``, such as ``offload_policy``.

    Raises:
        TypeError: An unknown argument, or ``opacus_high_precision_layers`` is no class; the model
            is private already.
    """
    if hasattr(model, "to_standard_module"):
        raise TypeError(
            "the model is private already: shard it first, build the optimizer from its "
            "parameters, then call make_private with a ghost_fsdp mode"
        )
    high = _classes(kwargs.pop("opacus_high_precision_layers", ()))
    blocks = kwargs.pop("use_block_wrapping", True)
    leaves = kwargs.pop("wrap_individual_layers", False)
    reshard = kwargs.pop("reshard_after_forward", None)
    _refuse_unknown(kwargs)
    whole = _unshardable(model)
    if whole:
        kwargs["ignored_params"] = {*(kwargs.get("ignored_params") or ()), *whole}
    block_kwargs = dict(kwargs) if reshard is None else {**kwargs, "reshard_after_forward": reshard}
    done = _shard_high_precision(model, high, block_kwargs) if high else set()
    if leaves:
        layers = dict.fromkeys(_layers_below(model))  # each once
        _shard_each([m for m in reversed(layers) if m not in done], block_kwargs)
    if blocks:
        _shard_each([m for m in blocks_of(model) if m not in done], block_kwargs)
    fully_shard(model, **kwargs)
    return model


def _unshardable(model: nn.Module) -> set[nn.Parameter]:
    """Frozen parameters of a kind that FSDP2 cannot split, such as torchao's int8 weights."""
    found: dict[str, set[nn.Parameter]] = {}
    for parameter in model.parameters():
        kind = type(parameter.data)
        if parameter.requires_grad or kind is torch.Tensor or isinstance(parameter, DTensor):
            continue
        try:
            parameter.chunk(2)
        except NotImplementedError:
            found.setdefault(kind.__name__, set()).add(parameter)
    for name, parameters in found.items():
        logger.warning(
            "%d frozen parameters are of type %s, which FSDP2 cannot split: each rank holds them "
            "whole", len(parameters), name,
        )  # fmt: skip
    return set().union(*found.values())


def _shard_each(modules: Iterable[nn.Module], kwargs: dict[str, Any]) -> None:
    """Make units of the modules that are none yet: a block may be a single layer."""
    for module in modules:
        if not is_fsdp(module):
            fully_shard(module, **kwargs)


def _layers_below(module: nn.Module) -> Iterator[nn.Module]:
    """Layers with parameters, outer ones first; no part of one that has to stay whole."""
    if _shares_with_parts(module):
        return
    for child in module.children():
        if has_params(child) or _shares_with_parts(child):
            yield child
        yield from _layers_below(child)


def _shares_with_parts(module: nn.Module) -> bool:
    """Whether a parameter of the module itself is one of a submodule, too.

    FSDP2 replaces the parameters of a unit; those of a unit inside would no longer be the same.
    """
    own = {id(p) for p in module._parameters.values() if p is not None}
    return bool(own) and any(
        id(p) in own for child in module.children() for p in child.parameters()
    )


def _classes(value: Any) -> tuple[type[nn.Module], ...]:
    classes = (value,) if isinstance(value, type) else tuple(value or ())
    if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise TypeError(f"opacus_high_precision_layers must be layer classes, got {value!r}")
    return classes


def _refuse_unknown(kwargs: Iterable[str]) -> None:
    known = {"mesh", "mp_policy", "offload_policy", "shard_placement_fn", "ignored_params"}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise TypeError(f"FSDP2Wrapper got unexpected arguments {unknown}")


def _shard_high_precision(
    model: nn.Module, classes: tuple[type[nn.Module], ...], kwargs: dict[str, Any]
) -> set[nn.Module]:
    """Make units of the layers of ``classes``; returns them and all that is inside them."""
    policy: MixedPrecisionPolicy | None = kwargs.get("mp_policy")
    output = policy.param_dtype if policy is not None else None
    exact = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=output
    )
    chosen: list[nn.Module] = []
    done: set[nn.Module] = set()
    for module in model.modules():  # outer ones first: what is inside belongs to them
        if isinstance(module, classes) and module is not model and module not in done:
            _refuse_parts(model, module)
            chosen.append(module)
            done.update(module.modules())
    for module in chosen:
        fully_shard(module, **{**kwargs, "mp_policy": exact})
    return done


def _refuse_parts(model: nn.Module, module: nn.Module) -> None:
    """Refuse to shard a part of a layer that has to stay whole, before anything is sharded."""
    for name, outer in model.named_modules():
        if outer is not module and _shares_with_parts(outer) and module in outer.modules():
            kind = type(outer).__name__
            raise ValueError(
                f"opacus_high_precision_layers: {type(module).__name__} is a part of '{name}' "
                f"({kind}), which shows its parameters as its own and can only be sharded as a "
                f"whole: name {kind} instead"
            )
