"""Plain linear layers whose gradients are carried: called without hooks, one node of the graph.

Note [A node for a linear layer]
    Hooks, a tap and the nodes of ``x W^T`` cost a layer more time in Python than its products
    take on a GPU where samples are short. Where the stored gradients of a plain ``nn.Linear`` are
    carried (see Note [Carriers] in :mod:`opacus.core.ranks.carried`), its call is one autograd
    function while its part of the model runs: its backward forms the gradient of the input, as
    autograd would, and what the carriers get. The numbers are the same.

    What the layer is called with otherwise, or where anybody else watches the call (hooks,
    checkpoints, autocast), it runs as ever, with its hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.core.platform.saved_tensors import packs_saved_tensors
from opacus.core.platform.torch_internals import (
    call_instead,
    direct_apply,
    hooks_every_module,
)
from opacus.core.record.carriers import HALF, Carriers, twice_differentiated
from opacus.core.record.hooks import LayerHooks
from opacus.core.rules.spec import LayerSpec

# What a plain layer computes, unless somebody has replaced it in all of them.
_FORWARD = nn.Linear.forward
# A layer, and what stands for its call.
Call = tuple[nn.Module, Callable[..., Any]]


def call_of(hooks: LayerHooks) -> Call | None:
    """What may stand for the call of a layer whose stored gradients are carried, if anything."""
    layer, module = hooks.layer, hooks.layer.module
    known = layer.spec.params == ("weight",) or layer.spec.params == ("weight", "bias")
    bias = "bias" in layer.spec.params
    if type(module) is not nn.Linear or not known or bias is (module.bias is None):
        return None
    return module, functools.partial(_run, hooks, module)


def call_directly(calls: Iterable[Call]) -> list[nn.Module]:
    """From now on these stand for their layers' calls; returns the layers.

    Left out are those that something else stands for.
    """
    called = []
    for module, call in calls:
        if "_compiled_call_impl" not in module.__dict__:
            call_instead(module, call)
            called.append(module)
    return called


def calls_may_change() -> bool:
    """Whether layers may be called without hooks now: nobody watches, or has changed, all of them.

    A checkpoint would save other tensors as it runs a layer again, which has its hooks then. In a
    graph there is nothing to save.
    """
    if torch.compiler.is_compiling() or nn.Linear.forward is not _FORWARD:
        return False
    return not (hooks_every_module() or packs_saved_tensors())


def _run(hooks: LayerHooks, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a plain linear layer, whose gradients go to the carriers that its hooks have."""
    carriers = hooks.carriers
    if carriers is None or len(args) != 1 or kwargs or torch.compiler.is_compiling():
        return module._call_impl(*args, **kwargs)
    x, parameters = args[0], module._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if not (
        type(x) is Tensor
        and _is_plain(weight)
        and (bias is None or _is_plain(bias))
        and _fits(carriers, x, weight)  # type: ignore[arg-type]
        and _is_unwatched(module)
        and hooks.recorder.active(module)
        and not (torch.is_autocast_enabled(x.device.type) or packs_saved_tensors())
    ):
        return module._call_impl(*args, **kwargs)  # with its hooks
    own = (weight.detach(), None if bias is None else bias.detach())  # type: ignore[union-attr]
    return _linear(x, *own, hooks.layer.spec, *carriers.form, *carriers.tensors)


def _is_plain(parameter: nn.Parameter | None) -> bool:
    """Whether it is a trainable parameter, and of no type that has products of its own."""
    return type(parameter) is nn.Parameter and parameter.requires_grad and parameter.is_leaf


def _fits(carriers: Carriers, x: Tensor, weight: Tensor) -> bool:
    """Whether the carriers take what the layer makes of ``x``; see :func:`carriers.carries`."""
    first = carriers.tensors[0]
    rows = x.dim() == carriers.dims > 1 and x.shape[0] == first.shape[0]
    dtype = x.dtype is first.dtype or (first.dtype is torch.float32 and x.dtype in HALF)
    return rows and dtype and x.dtype is weight.dtype


def _is_unwatched(module: nn.Module) -> bool:
    """Whether only our hooks would see the call."""
    return (
        len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
    )


class _Linear(torch.autograd.Function):
    """``x W^T + b``, whose backward also gives the carriers what their form makes of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: LayerSpec,
        form: Callable[..., tuple[Tensor, ...]],
        constants: tuple[Any, ...],
        *carriers: Tensor,
    ) -> Tensor:
        ctx.spec, ctx.form, ctx.constants = spec, form, constants
        ctx.save_for_backward(x, weight)
        output = F.linear(x, weight, bias)
        # What follows may change it in place, which autograd refuses of a view.
        return output.detach() if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise twice_differentiated(ctx.spec)
        (x, weight), grad = ctx.saved_tensors, grads[0]
        own = torch.matmul(grad, weight) if ctx.needs_input_grad[0] else None
        return own, None, None, None, None, None, *ctx.form(x, grad, *ctx.constants)


_linear = direct_apply(_Linear)
