"""The generic rule as functions: per-sample gradients of any layer by ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap


def make_functional(
    mod: nn.Module, disable_autograd_tracking: bool = False
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A function ``f(parameters, *args, **kwargs)`` that runs ``mod``, and its parameters.

    Args:
        mod: The module; the function keeps a copy without data.
        disable_autograd_tracking: Return detached parameters.
    """
    named = dict(mod.named_parameters())
    skeleton = copy.deepcopy(mod).to("meta")

    def run(parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(skeleton, dict(zip(named, parameters, strict=True)), args, kwargs)

    values = tuple(p.detach() if disable_autograd_tracking else p for p in named.values())
    return run, values


def prepare_layer(layer: nn.Module, batch_first: bool = True) -> None:
    """Set ``layer.ft_compute_sample_grad(parameters, activations, backprops)``.

    Args:
        layer: The layer.
        batch_first: Whether the layer wants the batch in dimension 0 (else in 1).

    Raises:
        NotImplementedError: The layer has buffers.
    """
    if next(layer.buffers(), None) is not None:
        raise NotImplementedError(
            f"{type(layer).__name__} has buffers, which torch.func would leave on the wrong device"
        )
    run, _ = make_functional(layer)
    dim = 0 if batch_first else 1

    def weighted_output(parameters: Sequence[Tensor], x: Tensor, backprop: Tensor) -> Tensor:
        output = run(parameters, x.unsqueeze(dim))
        return (output * backprop.unsqueeze(dim)).sum()

    layer.ft_compute_sample_grad = vmap(grad(weighted_output), in_dims=(None, 0, 0))


def ft_compute_per_sample_gradient(
    layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients ``{parameter: [B, *shape]}`` of all parameters of ``layer``.

    Args:
        layer: The layer, with one tensor input.
        activations: Its input ``[B, ...]``, in a list.
        backprops: Gradient of the summed losses with respect to its output, ``[B, ...]``.
    """
    if not hasattr(layer, "ft_compute_sample_grad"):
        prepare_layer(layer)
    parameters = list(layer.parameters())
    x = activations[0]
    if x.is_floating_point() and x.dtype != backprops.dtype:
        x = x.to(backprops.dtype)
    with torch.no_grad():
        values = [p.detach() for p in parameters]
    grads = layer.ft_compute_sample_grad(values, x, backprops)  # type: ignore[operator]
    return dict(zip(parameters, grads, strict=True))
