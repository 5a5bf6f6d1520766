"""Normalisation layers: ``y = w * x_hat + b``, with ``x_hat`` from one sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.core.kernels.host.operands import MOST_FEATURES
from opacus.core.kernels.norms.choice import is_usable
from opacus.core.kernels.norms.reference import widen
from opacus.core.rules.base import (
    Carried,
    LayerRule,
    Use,
    as_tokens,
    join_tokens,
    tokens_of,
    unsupported,
)
from opacus.core.rules.spec import LayerSpec


class TrailingNormRule(LayerRule):
    """Normalises the last dimensions; gradients are sums over the tokens before them."""

    # Whether the mean is taken out.
    centre: bool = False

    def features(self, spec: LayerSpec) -> int:
        return max((len(shape) for shape in spec.shapes.values()), default=1)

    def token_features(self, spec: LayerSpec) -> tuple[int, int]:
        dims = len(spec.options["shape"])
        return dims, dims

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        dims = len(spec.options["shape"])
        x, g = tokens_of(spec, activations, backprops, (dims, dims))
        return dict(zip(_trained(spec), _rows(x, g, *self._how(spec)), strict=True))

    def carried(self, spec: LayerSpec) -> Carried | None:
        return (_rows, self._how(spec)) if spec.params == _trained(spec) else None

    def _how(self, spec: LayerSpec) -> tuple[Any, ...]:
        shape, eps, trained = spec.options["shape"], spec.options["eps"], _trained(spec)
        return self.centre, shape, eps, "weight" in trained, "bias" in trained

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        affine, eps, shape = self.kernels.affine, spec.options["eps"], spec.options["shape"]
        if affine is None or eps is None or len(shape) != 1 or "weight" not in spec.params:
            return super().norm_sq(spec, activations, backprops)
        x, g = tokens_of(spec, activations, backprops, (1, 1))
        bias = "bias" in spec.params
        weight_sq, bias_sq = affine(x, g, eps=eps, centre=self.centre, bias=bias)
        return {"weight": weight_sq} | ({} if bias_sq is None else {"bias": bias_sq})

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        dims = len(spec.options["shape"])
        x, g = join_tokens([(a[0], b) for a, b in uses], (dims, dims))
        return (x,), g


class LayerNormRule(TrailingNormRule):
    """``torch.nn.LayerNorm``."""

    centre = True

    def options(self, module: nn.Module) -> dict[str, Any]:
        assert isinstance(module, nn.LayerNorm)
        return {"shape": tuple(module.normalized_shape), "eps": module.eps}


class RMSNormRule(TrailingNormRule):
    """``torch.nn.RMSNorm``."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        assert isinstance(module, nn.RMSNorm)
        # Without one torch takes the machine epsilon of the wide type it computes in.
        return {"shape": tuple(module.normalized_shape), "eps": module.eps}


class HuggingFaceRMSNormRule(RMSNormRule):
    """The RMSNorm classes of Hugging Face models; ``w`` or ``1 + w`` has the same gradient."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        eps = getattr(module, "variance_epsilon", None)
        eps = getattr(module, "eps", None) if eps is None else eps
        weight = module._parameters["weight"]
        assert weight is not None
        return {"shape": tuple(weight.shape), "eps": float(eps)}  # type: ignore[arg-type]


class ChannelNormRule(LayerRule):
    """Normalises channels of ``[B, C, ...]``; gradients are sums over the positions."""

    batch_leads = True

    def normalise(self, spec: LayerSpec, x: Tensor) -> Tensor:
        """``x_hat``, in the dtype of ``x``, as a tensor of its own."""
        raise NotImplementedError

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        x, g = activations[0], widen(backprops)
        channels = spec.shapes[spec.params[0]]
        if x.shape != g.shape or x.shape[1:2] != channels:
            raise unsupported(spec, activations, backprops, "its input is not [B, C, ...]")
        grads = {}
        if "weight" in spec.params:
            # In place: on a CPU one more tensor costs as much as the arithmetic.
            grads["weight"] = _over_positions(self.normalise(spec, widen(x)).mul_(g))
        if "bias" in spec.params:
            grads["bias"] = _over_positions(g)
        return grads


class GroupNormRule(ChannelNormRule):
    """``torch.nn.GroupNorm``."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        assert isinstance(module, nn.GroupNorm)
        return {"num_groups": module.num_groups, "eps": module.eps}

    def normalise(self, spec: LayerSpec, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        return F.group_norm(x, spec.options["num_groups"], eps=spec.options["eps"])


class InstanceNormRule(ChannelNormRule):
    """``torch.nn.InstanceNorm1d``, ``2d`` and ``3d``."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        return {"eps": module.eps}

    def normalise(self, spec: LayerSpec, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        return F.instance_norm(x, eps=spec.options["eps"])  # type: ignore[arg-type]


def _trained(spec: LayerSpec) -> tuple[str, ...]:
    return tuple([name for name in ("weight", "bias") if name in spec.params])


def _rows(
    x: Tensor,
    g: Tensor,
    centre: bool,
    shape: tuple[int, ...],
    eps: float | None,
    weight: bool,
    bias: bool,
) -> tuple[Tensor, ...]:
    """See :meth:`LayerRule.carried`."""
    x, g = as_tokens(x, len(shape)), as_tokens(g, len(shape))
    if weight and eps is not None and _has_kernel(x, g):
        from opacus.core.kernels.norms.bias_and_affine import affine_grads

        return tuple(affine_grads(x, g, eps=eps, centre=centre, bias=bias))
    rows = []
    if weight:
        normalise: Any = F.layer_norm if centre else F.rms_norm
        rows.append((g * normalise(widen(x), shape, eps=eps)).sum(1))
    if bias:
        rows.append(widen(g).sum(1))
    return tuple(rows)


def _has_kernel(x: Tensor, g: Tensor) -> bool:
    """Whether a Triton kernel reads ``[B, T, d]`` once; without, six passes in fp32.

    A compiler makes one of its own.
    """
    if torch.compiler.is_compiling() or not (type(x) is type(g) is Tensor and x.dim() == 3):
        return False
    return is_usable(x, g) and x.shape[2] <= MOST_FEATURES


def _over_positions(tensor: Tensor) -> Tensor:
    """``[B, C, ...] -> [B, C]``."""
    return tensor.flatten(2).sum(2) if tensor.dim() > 2 else tensor
