"""Plain linear layers, such as adapters, that run with a weight of its own for each sample.

Note [A weight for each sample]
    A layer with a small weight costs its hooks, its tap and the tap's backward in Python, not
    arithmetic. Where its per-sample gradients are carried in any case (see Note [Carriers] in
    :mod:`opacus.core.ranks.carried`), the carrier can be the weight itself: one view of it for each
    sample, ``[B, d, p]``, without memory of its own. ``y_i = x_i W_i`` is what the layer gives, and
    the gradient that autograd forms for ``W_i`` is sample i's. So the layer's call is one batched
    product while its part of the model runs. There is no hook, no tap, and no Python in the
    backward pass.

    What the layer is called with otherwise (other rows, another type), it runs as ever, with its
    hooks: it is tapped, and has a record.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.saved_tensors import packs_saved_tensors
from opacus.core.platform.sizes import OWN_WEIGHT_WIDTH
from opacus.core.platform.torch_internals import call_instead
from opacus.core.record.layers import Layer

# Layers, and the weights of each for all samples.
Owned = list[tuple[nn.Module, Tensor]]


def can_own(layer: Layer) -> bool:
    """Whether a layer is a plain linear one whose weight is low, and all that it trains."""
    module, rule = layer.module, layer.rule
    if type(module) is not nn.Linear or layer.spec.params != ("weight",) or rule.needs_parameters:
        return False
    return module.bias is None and min(module.weight.shape) <= OWN_WEIGHT_WIDTH


def views_to_own(
    module: nn.Module, batch: int | None, cast: torch.dtype | None = None
) -> Tensor | None:
    """``[B, d, p]`` views of the weight; ``None`` if not only our hooks would see the call now.

    It is called without gradient tracking.

    Args:
        module: A layer of which :func:`can_own` holds.
        batch: Number of samples B.
        cast: See :func:`cast_on`.
    """
    own = module.__dict__
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    alone = (
        len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not ("forward" in own or "_compiled_call_impl" in own)
    )
    if not (alone and module.training) or bias is not None or batch is None:
        return None
    # Other types (shards, quantised weights) have a product of their own.
    if type(weight) is not nn.Parameter or not (weight.requires_grad and weight.is_leaf):
        return None
    if cast is None:
        return weight.t().expand(batch, -1, -1)
    if weight.dtype not in (cast, torch.float32):
        return None
    return weight.to(cast).t().expand(batch, -1, -1)


def cast_on(device: torch.device) -> torch.dtype | None:
    """What autocast casts weights to, if it is on."""
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def own_weights(owned: Owned, cast: torch.dtype | None = None) -> None:
    """From now on these layers run with their ``[B, d, p]``."""
    for module, weights in owned:
        weight = module._parameters["weight"]
        place = None if weight is None else weight.data_ptr()
        call_instead(module, functools.partial(_run, weights, weight, place, cast, module))


def _run(
    weights: Tensor,
    weight: Any,
    place: int | None,
    cast: torch.dtype | None,
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a layer whose ``weight`` the ``weights`` are views of, if that is still at its place."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if (
        type(x) is Tensor
        and x.dim() == 3
        and x.shape[0] == weights.shape[0]
        and (x.dtype is weights.dtype if cast is None else _casts(x, cast))
        and module._parameters["weight"] is weight
        and weight.data_ptr() == place
        and not packs_saved_tensors()
    ):
        return torch.bmm(x, weights)
    return module._call_impl(*args, **kwargs)  # with its hooks


def _casts(x: Tensor, cast: torch.dtype) -> bool:
    """Whether autocast, as it was on for the weights, lets an input have their type."""
    return x.dtype in (cast, torch.float32) and cast_on(x.device) is cast
