"""Linear layers: ``y = x W^T + b`` on ``[B, ..., d] -> [B, ..., p]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.reference import product_norm_sq, sum_of_squares, widen
from opacus.core.rules.base import LayerRule, Use, as_tokens, join_tokens, scale_rows
from opacus.core.spec import LayerSpec


class LinearRule(LayerRule):
    """The weight's per-sample gradient is ``G_i^T A_i``, the bias' ``sum_t G_it``."""

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        x, g = as_tokens(activations[0]), as_tokens(backprops)
        grads = {}
        if "weight" in spec.params:
            grads["weight"] = torch.bmm(g.transpose(1, 2), x)
        if "bias" in spec.params:
            grads["bias"] = g.sum(1)
        return grads

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        x, g = as_tokens(activations[0]), as_tokens(backprops)
        norms = {}
        if "weight" in spec.params:
            norms["weight"] = product_norm_sq(x, g)
        if "bias" in spec.params:
            norms["bias"] = sum_of_squares(_token_sum(g))
        return norms

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        g = as_tokens(scale_rows(backprops, factors)).flatten(0, 1)
        grads = {}
        if "weight" in spec.params:
            grads["weight"] = g.t() @ as_tokens(activations[0]).flatten(0, 1)
        if "bias" in spec.params:
            grads["bias"] = g.sum(0)
        return grads

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        x, g = join_tokens([(a[0], b) for a, b in uses], (1, 1))
        return (x,), g


def _token_sum(backprops: Tensor) -> Tensor:
    """``[B, T, p] -> [B, p]``, in at least fp32."""
    return backprops.sum(1, dtype=widen(backprops.new_empty(0)).dtype)
