"""Convolutions: a linear layer on the patches of its input.

Letters: B samples, G groups, L output positions, K kernel positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.grad as nn_grad
from torch import Tensor, nn

from opacus.core.kernels.reference import product_norm_sq, sum_of_squares
from opacus.core.rules.base import LayerRule, scale_rows
from opacus.core.spec import LayerSpec

_PADDING_MODES = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
}


class ConvRule(LayerRule):
    """``torch.nn.Conv1d``, ``2d`` and ``3d``, all strides, dilations, paddings and groups."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        return {
            "kernel": tuple(module.kernel_size),
            "stride": tuple(module.stride),
            "dilation": tuple(module.dilation),
            "groups": module.groups,
            "padding": _padding(module),
            "mode": _PADDING_MODES[module.padding_mode],
        }

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        grads = {}
        if "weight" in spec.params:
            patches, g = _patches(spec, activations[0]), _grouped(spec, backprops)
            shape = spec.shapes["weight"]
            product = torch.matmul(g.transpose(2, 3), patches)  # [B, G, p/G, (d/G) K]
            grads["weight"] = product.reshape(len(backprops), *shape)
        if "bias" in spec.params:
            grads["bias"] = backprops.flatten(2).sum(2)
        return grads

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        norms = {}
        if "weight" in spec.params:
            patches, g = _patches(spec, activations[0]), _grouped(spec, backprops)
            groups = g.shape[1]
            by_group = product_norm_sq(patches.flatten(0, 1), g.flatten(0, 1))
            norms["weight"] = by_group.view(len(backprops), groups).sum(1)
        if "bias" in spec.params:
            norms["bias"] = sum_of_squares(backprops.flatten(2).sum(2))
        return norms

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        g = scale_rows(backprops, factors)
        grads = {}
        if "weight" in spec.params:
            options, dims = spec.options, len(spec.options["kernel"])
            weight = _CONV_WEIGHT[dims]
            grads["weight"] = weight(
                _pad(spec, activations[0]),
                spec.shapes["weight"],
                g,
                options["stride"],
                (0,) * dims,
                options["dilation"],
                options["groups"],
            )
        if "bias" in spec.params:
            grads["bias"] = g.flatten(2).sum(2).sum(0)
        return grads


_CONV_WEIGHT = {
    1: nn_grad.conv1d_weight,
    2: nn_grad.conv2d_weight,
    3: nn_grad.conv3d_weight,
}


def _padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...]:
    """Padding in the order of ``F.pad``: last dimension first, before and after."""
    pairs: list[tuple[int, int]] = []
    for dim, kernel in enumerate(module.kernel_size):
        if module.padding == "same":
            total = module.dilation[dim] * (kernel - 1)
            pairs.append((total // 2, total - total // 2))
        elif module.padding == "valid":
            pairs.append((0, 0))
        else:
            amount = int(module.padding[dim])
            pairs.append((amount, amount))
    return tuple(amount for pair in reversed(pairs) for amount in pair)


def _pad(spec: LayerSpec, x: Tensor) -> Tensor:
    padding = spec.options["padding"]
    if not any(padding):
        return x
    if len(x) == 0:
        grown = [
            n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(reversed(x.shape[2:]))
        ]
        return x.new_zeros(0, x.shape[1], *reversed(grown))
    return F.pad(x, padding, mode=spec.options["mode"])


def _patches(spec: LayerSpec, x: Tensor) -> Tensor:
    """Input patches ``[B, G, L, (d/G) K]`` that each output position sees."""
    options = spec.options
    kernel, dims = options["kernel"], len(options["kernel"])
    x = _pad(spec, x)
    for dim in range(dims):
        span = options["dilation"][dim] * (kernel[dim] - 1) + 1
        x = x.unfold(2 + dim, span, options["stride"][dim])[..., :: options["dilation"][dim]]
    batch, channels, groups = x.shape[0], x.shape[1], options["groups"]
    positions = math.prod(x.shape[2 : 2 + dims])
    x = x.reshape(batch, groups, channels // groups, positions, math.prod(kernel))
    return x.transpose(2, 3).reshape(
        batch, groups, positions, channels // groups * math.prod(kernel)
    )


def _grouped(spec: LayerSpec, backprops: Tensor) -> Tensor:
    """``[B, p, ...] -> [B, G, L, p/G]``."""
    batch, channels = backprops.shape[:2]
    groups = spec.options["groups"]
    positions = math.prod(backprops.shape[2:])
    return backprops.reshape(batch, groups, channels // groups, positions).transpose(2, 3)
