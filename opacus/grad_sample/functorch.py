"""The generic rule as functions: per-sample gradients of any layer by ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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


class SampleGradient:
    """Per-sample gradients of one layer, as its attribute ``ft_compute_sample_grad``.

    Args:
        layer: The layer.
        batch_first: Whether the layer wants the batch in dimension 0 (else in 1).
        paused: Context in which the layer may run without being recorded.
    """

    def __init__(
        self,
        layer: nn.Module,
        batch_first: bool = True,
        paused: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.layer = layer
        self.dim = 0 if batch_first else 1
        self.paused = paused

    def __call__(
        self, parameters: Sequence[Tensor], activations: Tensor, backprops: Tensor
    ) -> tuple[Tensor, ...]:
        """Per-sample gradients ``[B, *shape]`` of each of ``parameters``.

        Args:
            parameters: Values of ``layer.parameters()``.
            activations: Inputs of the layer, batch first.
            backprops: Gradient with respect to its output, batch first.
        """
        names = [name for name, _ in self.layer.named_parameters()]

        def weighted_output(values: Sequence[Tensor], x: Tensor, backprop: Tensor) -> Tensor:
            named = dict(zip(names, values, strict=True))
            output = functional_call(self.layer, named, (x.unsqueeze(self.dim),))
            return (output * backprop.unsqueeze(self.dim)).sum()

        with self.paused():
            mapped = vmap(grad(weighted_output), in_dims=(None, 0, 0))
            return tuple(mapped(tuple(parameters), activations, backprops))


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
    layer.ft_compute_sample_grad = SampleGradient(layer, batch_first)  # type: ignore[assignment]


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
