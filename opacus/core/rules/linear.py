"""Linear layers: ``y = x W^T + b`` on ``[B, ..., d] -> [B, ..., p]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import by_input, stacked_bytes, wide_bmm, wide_dtype
from opacus.core.kernels.norms.tied import Heads, at_rows
from opacus.core.platform.profiling import layers
from opacus.core.rules.base import (
    Carried,
    LayerRule,
    Use,
    as_tokens,
    join_tokens,
    scale_rows,
    tokens_of,
)
from opacus.core.rules.spec import LayerSpec

# Least rows of a weight that a rank gets whose sum is formed as one product for each rank.
RANK_ROWS = 256


class LinearNorms(LayerRule):
    """Squared norms, of one layer and of several together, without per-sample gradients."""

    beside_tables = True
    takes_several = True

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        x, g = _tokens(spec, activations, backprops)
        norms = {}
        if "weight" in spec.params:
            norms["weight"] = self.kernels.product(x, g)
        if "bias" in spec.params:
            norms["bias"] = self.kernels.bias(g)
        return norms

    def norm_cost(self, spec: LayerSpec, activations: Any, backprops: Any) -> float:
        x, g = _tokens(spec, activations, backprops)
        return x.shape[0] * self.kernels.product_cost(x.shape[1], x.shape[2], g.shape[2])

    def stacked_bytes(self, spec: LayerSpec, activations: Any, backprops: Any) -> int:
        pair = _tokens(spec, activations, backprops)
        return stacked_bytes(*pair) if "weight" in spec.params else 0

    def norm_sq_of_several(
        self, uses: Sequence[tuple[LayerSpec, Any, Any]]
    ) -> list[dict[str, Tensor]]:
        pairs = [_tokens(spec, a, b) for spec, a, b in uses]
        weights = _with_weight(uses)
        products = self.kernels.products([pairs[i] for i in weights])
        return self._with_biases(uses, pairs, weights, products)

    def norm_sq_of_many(
        self, uses: Sequence[tuple[LayerSpec, Any, Any]]
    ) -> list[dict[str, Tensor]] | None:
        if self.kernels.grouped is None:
            return None
        pairs = [_tokens(spec, a, b) for spec, a, b in uses]
        # Those with one input in a row: they share its Gram matrix.
        weights = [i for same in by_input(pairs) for i in same if "weight" in uses[i][0].params]
        with layers(spec.name for spec, _, _ in uses):
            products = self.kernels.grouped([pairs[i] for i in weights])
        return self._with_biases(uses, pairs, weights, products)

    def _with_biases(
        self,
        uses: Sequence[tuple[LayerSpec, Any, Any]],
        pairs: Sequence[tuple[Tensor, Tensor]],
        weights: Sequence[int],
        products: Sequence[Tensor],
    ) -> list[dict[str, Tensor]]:
        """Norms by layer; ``products`` are those of the weights of the uses ``weights``."""
        norms: list[dict[str, Tensor]] = [{} for _ in uses]
        for place, value in zip(weights, products, strict=True):
            norms[place]["weight"] = value
        for place, (spec, _, _) in enumerate(uses):
            if "bias" in spec.params:
                norms[place]["bias"] = self.kernels.bias(pairs[place][1])
        return norms

    def beside_table(
        self, spec: LayerSpec, activations: Any, backprops: Any, ids: Tensor
    ) -> tuple[Heads, dict[str, Tensor]]:
        x, g = _tokens(spec, activations, backprops)
        norms = self.norm_sq(spec, activations, backprops)
        own = norms.pop("weight")  # mended where terms had cancelled
        return Heads(x, at_rows(g, ids), torch.stack([own, own])), norms


class LinearSums(LayerRule):
    """Sums over the batch, each as one product."""

    transposed = False  # whether the weight is [d, p]

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        x, g = _tokens(spec, activations, scale_rows(backprops, factors))
        g = g.flatten(0, 1)
        grads = {}
        if "weight" in spec.params:
            grads["weight"] = g.t() @ x.flatten(0, 1)
        if "bias" in spec.params:
            grads["bias"] = g.sum(0)
        return grads

    def wide_sum(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        x, g = _tokens(spec, activations, backprops)
        x, g = x.flatten(0, 1), g.flatten(0, 1)
        sums = {}
        if "weight" in spec.params:
            sums["weight"] = wide_bmm(g.t().unsqueeze(0), x.unsqueeze(0))[0]
        if "bias" in spec.params:
            sums["bias"] = g.sum(0, dtype=wide_dtype(g))
        return sums

    def can_write(self, spec: LayerSpec, activations: Any, backprops: Any, out: Tensor) -> bool:
        x, g, ranks = activations[0], backprops, out.shape[0]
        rows = x.shape[-1] if self.transposed else g.shape[-1]
        return (
            spec.params == ("weight",)
            and type(x) is type(g) is Tensor
            and out.numel() == x.shape[-1] * g.shape[-1]  # else bmm would resize it
            and x.dtype == g.dtype
            and out.dtype == wide_dtype(g)
            and (g.is_cuda or g.dtype == out.dtype)  # else copies would be widened for each rank
            and rows % ranks == 0
            and (ranks == 1 or rows // ranks >= RANK_ROWS)
        )

    def write_sum(self, spec: LayerSpec, activations: Any, backprops: Any, out: Tensor) -> None:
        x, g = _tokens(spec, activations, backprops)
        x, g = x.flatten(0, 1), g.flatten(0, 1)
        left, right = (x, g) if self.transposed else (g, x)
        left = left.t().unflatten(0, (len(out), -1))  # [W, p / W, tokens]
        right = right.expand(len(out), *right.shape)
        wide_bmm(left, right, out=out.unflatten(1, (-1, right.shape[2])))  # [W, p / W, d]


class LinearRule(LinearNorms, LinearSums):
    """The weight's per-sample gradient is ``G_i^T A_i``, the bias' ``sum_t G_it``."""

    light = ("bias",)
    bilinear = ("weight",)

    def features(self, spec: LayerSpec) -> int:
        return 1

    def token_features(self, spec: LayerSpec) -> tuple[int, int]:
        return 1, 1

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        x, g = _tokens(spec, activations, backprops)
        grads = {}
        if "weight" in spec.params:
            grads["weight"] = self.products(x, g)
        if "bias" in spec.params:
            grads["bias"] = g.sum(1)
        return grads

    def products(self, x: Tensor, g: Tensor) -> Tensor:
        """The weight's per-sample gradients from ``[B, T, d]`` and ``[B, T, p]``."""
        return products_of_rows(x, g) if self.transposed else products_of_rows(g, x)

    def carried(self, spec: LayerSpec) -> Carried | None:
        known = spec.params in (("weight", "bias"), ("weight",), ("bias",))
        some = tuple([name in spec.params for name in ("weight", "bias")])
        return (_rows, (self.transposed, *some)) if known else None

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        x, g = join_tokens([(a[0], b) for a, b in uses], (1, 1))
        return (x,), g


class TransposedLinearRule(LinearRule):
    """A linear layer whose weight is ``[d, p]``, such as GPT-2's ``Conv1D``."""

    beside_tables = False
    transposed = True

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        return _transposed(super().weighted_grad(spec, activations, backprops, factors))

    def wide_sum(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        return _transposed(super().wide_sum(spec, activations, backprops))


def _rows(x: Tensor, g: Tensor, transposed: bool, weight: bool, bias: bool) -> tuple[Tensor, ...]:
    """See :meth:`LayerRule.carried`."""
    if g.dim() != 3 or x.dtype != g.dtype:  # autocast lets a layer's input and output differ
        x, g = as_tokens(x.to(g.dtype)), as_tokens(g)
    rows = []
    if weight:
        rows.append(products_of_rows(x, g) if transposed else products_of_rows(g, x))
    if bias:
        rows.append(g.sum(1))
    return tuple(rows)


def _tokens(spec: LayerSpec, activations: Any, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """Input and backprops as ``[B, T, d]`` and ``[B, T, p]``; T is 1 if there are no tokens."""
    x, g = activations[0], backprops
    dims = x.dim()
    if dims == g.dim() and dims in (2, 3) and x.shape[:-1] == g.shape[:-1]:
        return (x, g) if dims == 3 else (x.unsqueeze(1), g.unsqueeze(1))
    return tokens_of(spec, activations, backprops, (1, 1))


def _with_weight(uses: Sequence[tuple[LayerSpec, Any, Any]]) -> list[int]:
    return [i for i, (spec, _, _) in enumerate(uses) if "weight" in spec.params]


def _transposed(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.t() if name == "weight" else g for name, g in grads.items()}


def products_of_rows(left: Tensor, right: Tensor) -> Tensor:
    """``L_i^T R_i`` of each sample's ``[T, p]`` and ``[T, d]``: ``[B, p, d]``."""
    if left.shape[0] == 1:  # a plain product starts sooner than a batched one
        return torch.mm(left[0].t(), right[0]).unsqueeze(0)
    return torch.bmm(left.mT, right)
