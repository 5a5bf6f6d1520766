"""Convolutions: a linear layer on the patches of its input.

Letters: B samples, U uses in one step, G groups, L output positions, K kernel positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.grad as nn_grad
from torch import Tensor, nn

from opacus.core.kernels.norms.reference import (
    sum_of_squares,
    widen,
)
from opacus.core.platform.sizes import CHUNK_ELEMENTS
from opacus.core.rules.base import LayerRule, Use, pad_rows, scale_rows, unsupported
from opacus.core.rules.spec import LayerSpec

# Elements of a CPU's vector, in fp32, and of half a vector.
VECTOR, HALF_VECTOR = 16, 8

_PADDING_MODES = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
}


class ConvRule(LayerRule):
    """``torch.nn.Conv1d``, ``2d`` and ``3d``, all strides, dilations, paddings and groups."""

    batch_leads = True

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

    def token_features(self, spec: LayerSpec) -> tuple[int, int]:
        rank = 1 + len(spec.options["kernel"])  # rows of a unit are so many uses, joined
        return rank, rank

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        x, g = _uses(spec, activations, backprops)
        grads = {}
        if "weight" in spec.params and _grouped_is_faster(spec, x, g):
            grads["weight"] = _grouped(spec, x[:, 0], g[:, 0])
        elif "weight" in spec.params:
            parts = [
                torch.matmul(part.transpose(2, 3), patches)  # [B, G, p/G, (d/G) K]
                for _, patches, part in _unfolded(spec, x, g)
            ]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else g.new_empty(0)
            grads["weight"] = whole.reshape(len(g), *spec.shapes["weight"])
        if "bias" in spec.params:
            grads["bias"] = g.flatten(3).sum((1, 3))
        return grads

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        x, g = _uses(spec, activations, backprops)
        norms = {}
        if "weight" in spec.params and _grouped_is_faster(spec, x, g):
            step = max(1, CHUNK_ELEMENTS // math.prod(spec.shapes["weight"]))
            parts = zip(x[:, 0].split(step), g[:, 0].split(step), strict=True)
            norms["weight"] = torch.cat([sum_of_squares(_grouped(spec, *part)) for part in parts])
        elif "weight" in spec.params:
            weight = widen(g.new_zeros(len(g)))
            for rows, patches, part in _unfolded(spec, x, g):
                by_group = self._product_norm_sq(patches.flatten(0, 1), part.flatten(0, 1))
                weight[rows] = by_group.view(part.shape[:2]).sum(1)
            norms["weight"] = weight
        if "bias" in spec.params:
            norms["bias"] = sum_of_squares(widen(g).flatten(3).sum((1, 3)))
        return norms

    def _product_norm_sq(self, patches: Tensor, backprops: Tensor) -> Tensor:
        # The product's rows should be whole vectors of the CPU; its norm is that of its transpose.
        if not patches.is_cuda and patches.shape[2] % VECTOR and not backprops.shape[2] % VECTOR:
            return self.kernels.product(backprops, patches)
        return self.kernels.product(patches, backprops)

    def norm_cost(self, spec: LayerSpec, activations: Any, backprops: Any) -> float:
        _, g = _uses(spec, activations, backprops)
        groups = spec.options["groups"]
        inputs = math.prod(spec.shapes.get("weight", (1, 1))[1:])
        tokens = g.shape[1] * math.prod(g.shape[3:])
        return len(g) * groups * self.kernels.product_cost(tokens, inputs, g.shape[2] // groups)

    def forms_grads(self, spec: LayerSpec, activations: Any, backprops: Any) -> bool:
        x, g = _uses(spec, activations, backprops)
        return "weight" not in spec.params or _grouped_is_faster(spec, x, g)

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        x, g = _uses(spec, activations, scale_rows(backprops, factors))
        x, g = x.flatten(0, 1), g.flatten(0, 1)
        grads = {}
        if "weight" in spec.params:
            grads["weight"] = _weight_grad(spec, x, g)
        if "bias" in spec.params:
            grads["bias"] = g.flatten(2).sum((0, 2))
        return grads

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        """One more dimension, after the batch, where all uses have the same shape."""
        pairs = [_uses(spec, *use) for use in uses]
        if len({x.shape[2:] for x, _ in pairs}) > 1:
            return None
        rows = max(len(x) for x, _ in pairs)
        x = torch.cat([pad_rows(x, rows) for x, _ in pairs], dim=1)
        return (x,), torch.cat([pad_rows(g, rows) for _, g in pairs], dim=1)


_CONV_WEIGHT = {
    1: nn_grad.conv1d_weight,
    2: nn_grad.conv2d_weight,
    3: nn_grad.conv3d_weight,
}


def _weight_grad(spec: LayerSpec, x: Tensor, g: Tensor, samples: int = 1) -> Tensor:
    """The gradient of the weight, summed over the batch.

    With ``samples`` above 1 they are groups of one convolution: ``x [1, samples d, ...]`` and
    ``g [1, samples p, ...]`` give ``[samples p, d/G, *kernel]``.
    """
    options, dims = spec.options, len(spec.options["kernel"])
    padding, (outputs, *rest) = _symmetric(spec), spec.shapes["weight"]
    return _CONV_WEIGHT[dims](
        _pad(spec, x) if padding is None else x,
        (samples * outputs, *rest),
        g,
        options["stride"],
        (0,) * dims if padding is None else padding,
        options["dilation"],
        samples * options["groups"],
    )


def _grouped(spec: LayerSpec, x: Tensor, g: Tensor) -> Tensor:
    """Per-sample gradients ``[B, *weight]`` by one convolution with each sample as a group."""
    x, g = x.contiguous(), g.contiguous()
    grads = _weight_grad(spec, x.flatten(0, 1)[None], g.flatten(0, 1)[None], len(g))
    return grads.view(len(g), *spec.shapes["weight"])


def _grouped_is_faster(spec: LayerSpec, x: Tensor, g: Tensor) -> bool:
    """Whether :func:`_grouped` is faster than products of patches.

    On a CPU and in fp32, where oneDNN computes it without patches, if its vectors are full of
    channels and there are more positions than channels to add up.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or g.dtype != torch.float32:
        return False
    if x.shape[1] != 1 or len(g) == 0 or not torch.backends.mkldnn.is_available():
        return False
    groups, kernel = spec.options["groups"], spec.options["kernel"]
    channels = x.shape[2] // groups, g.shape[2] // groups
    if any(c < VECTOR or c % HALF_VECTOR for c in channels):
        return False
    return math.prod(g.shape[3:]) >= max(channels) and math.prod(kernel) > 1


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


def _symmetric(spec: LayerSpec) -> tuple[int, ...] | None:
    """Padding in the order of the dimensions if it is zeros, as many before as after."""
    before, after = spec.options["padding"][::2], spec.options["padding"][1::2]
    if spec.options["mode"] != "constant" or before != after:
        return None
    return tuple(reversed(before))


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


def _uses(spec: LayerSpec, activations: Any, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """Input ``[B, U, d, ...]`` and backprops ``[B, U, p, ...]`` of U joined uses."""
    x, rank = activations[0], 2 + len(spec.options["kernel"])
    same_rows = x.dim() == backprops.dim() and len(x) == len(backprops)
    if not same_rows or x.dim() not in (rank, rank + 1):
        raise unsupported(spec, activations, backprops, "its input is not a batch")
    if x.dim() == rank:
        return x.unsqueeze(1), backprops.unsqueeze(1)
    return x, backprops


def _unfolded(
    spec: LayerSpec, x: Tensor, backprops: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """A few samples at a time, the layer as a linear one on positions as tokens.

    Yields:
        Which samples, their patches ``[B, G, U L, (d/G) K]`` and backprops
        ``[B, G, U L, p/G]``.
    """
    batch, uses, channels, *positions = backprops.shape
    kernel, groups = spec.options["kernel"], spec.options["groups"]
    inputs, places = x.shape[2] * math.prod(kernel), math.prod(positions)
    step = max(1, CHUNK_ELEMENTS // max(1, uses * places * inputs))
    for start in range(0, batch, step):
        rows = slice(start, min(start + step, batch))
        columns = _columns(spec, _pad(spec, x[rows].flatten(0, 1)))
        patches = _by_group(columns.view(-1, uses, groups, inputs // groups, places))
        g = backprops[rows].reshape(-1, uses, groups, channels // groups, places)
        yield rows, patches, _by_group(g)


def _by_group(tensor: Tensor) -> Tensor:
    """``[B, U, G, width, L] -> [B, G, U L, width]``, a view if there is one use."""
    if tensor.shape[1] == 1:
        return tensor[:, 0].transpose(2, 3)
    return tensor.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _columns(spec: LayerSpec, x: Tensor) -> Tensor:
    """``[N, d, ...] -> [N, d K, L]``: what each output position of a padded input sees."""
    options, batch = spec.options, x.shape[0]
    kernel, stride, dilation = options["kernel"], options["stride"], options["dilation"]
    for dim in range(x.dim() - 2):
        span = dilation[dim] * (kernel[dim] - 1) + 1
        x = x.unfold(2 + dim, span, stride[dim])[..., :: dilation[dim]]
    spatial = (x.dim() - 2) // 2
    x = x.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
    return x.reshape(batch, -1, math.prod(x.shape[2 + spatial :]))
