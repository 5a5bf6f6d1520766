"""Questions about modules: which own parameters, which are trainable."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, submodule)`` for each submodule that owns parameters itself."""
    for name, submodule in module.named_modules():
        if any(True for _ in submodule.parameters(recurse=False)):
            yield name, submodule


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, submodule)`` for each submodule that owns trainable parameters itself."""
    for name, submodule in module.named_modules():
        if has_trainable_params(submodule):
            yield name, submodule


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield ``(name, parameter)`` for each parameter, at any depth, that requires gradients."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def has_trainable_params(module: nn.Module) -> bool:
    """Whether ``module`` itself, its submodules left aside, owns a trainable parameter."""
    return requires_grad(module)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Whether any parameter of ``module`` requires gradients.

    Args:
        module: The module.
        recurse: Whether parameters of submodules count too.
    """
    return any(parameter.requires_grad for parameter in module.parameters(recurse))


def clone_module(module: M) -> M:
    """An independent copy of ``module``; parameters tied in it are tied in the copy.

    Modules that ``copy.deepcopy`` refuses (they hold tensors with a graph, for
    instance) are copied by saving and loading them.
    """
    try:
        return copy.deepcopy(module)
    except RuntimeError:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        clone: M = torch.load(buffer, weights_only=False)
        return clone


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """The submodule with the qualified name ``target``; ``""`` is ``module`` itself.

    Raises:
        AttributeError: There is no such submodule.
    """
    return module.get_submodule(target)


def are_state_dict_equal(sd1: Mapping[str, Tensor], sd2: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts have the same keys and, up to rounding, the same tensors.

    Tensors of different shape, dtype or device are different.
    """
    return sd1.keys() == sd2.keys() and all(_close(sd1[key], sd2[key]) for key in sd1)


def _close(first: Tensor, second: Tensor) -> bool:
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    return torch.allclose(first, second)
