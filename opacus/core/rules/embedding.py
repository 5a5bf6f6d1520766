"""Lookup tables: Embedding on ``[B, ...] -> [B, ..., d]``, and EmbeddingBag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.kernels.norms.reference import distinct_pairs, table_norm_sq, wide_dtype, widen
from opacus.core.rules.base import (
    LayerRule,
    Use,
    join_tokens,
    scale_rows,
    tokens_of,
    unsupported,
)
from opacus.core.rules.spec import LayerSpec


class _TableRule(LayerRule):
    """Code shared by both kinds of table, given the lookups."""

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        grad = _per_sample(spec, *self._lookups(spec, activations, backprops), len(backprops))
        return {"weight": grad.to(backprops.dtype)}

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        lookups = self._lookups(spec, activations, backprops)
        return {"weight": table_norm_sq(*lookups, len(backprops))}

    def norm_cost(self, spec: LayerSpec, activations: Any, backprops: Any) -> float:
        return 0.0  # sorting and adding, no products

    def _lookups(
        self, spec: LayerSpec, activations: Any, backprops: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row, sample and gradient of each lookup, flattened."""
        raise NotImplementedError


class EmbeddingRule(_TableRule):
    """Each lookup adds its backprop to a row of the table; the padding row gets none."""

    def features(self, spec: LayerSpec) -> int:
        return 1

    def token_features(self, spec: LayerSpec) -> tuple[int, int]:
        return 0, 1

    def options(self, module: nn.Module) -> dict[str, Any]:
        assert isinstance(module, nn.Embedding)
        _refuse(module)
        return {"padding_idx": module.padding_idx}

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        if self.kernels.embedding is None:
            return super().norm_sq(spec, activations, backprops)
        ids, g = tokens_of(spec, activations, backprops, (0, 1))
        return {"weight": self.kernels.embedding(ids, g, spec.options["padding_idx"])}

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        ids, g = tokens_of(spec, activations, scale_rows(backprops, factors), (0, 1))
        padding = spec.options["padding_idx"]
        grad = torch.ops.aten.embedding_dense_backward(
            g,
            ids,
            spec.shapes["weight"][0],
            -1 if padding is None else padding,
            False,
        )
        return {"weight": grad}

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        ids, g = join_tokens([(a[0], b) for a, b in uses], (0, 1))
        return (ids,), g

    def _lookups(
        self, spec: LayerSpec, activations: Any, backprops: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids, g = self.looked_up(spec, activations, backprops)
        return ids.reshape(-1), _samples(ids), g.flatten(0, 1)

    def looked_up(
        self, spec: LayerSpec, activations: Any, backprops: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows ``[B, T]`` and gradients ``[B, T, d]``; that of the padding row is zero."""
        ids, g = tokens_of(spec, activations, backprops, (0, 1))
        padding = spec.options["padding_idx"]
        return ids, g if padding is None else g.masked_fill((ids == padding)[..., None], 0.0)


class EmbeddingBagRule(_TableRule):
    """Sums or means of table rows; ``offsets`` or a two-dimensional input say which."""

    batch_leads = True

    def options(self, module: nn.Module) -> dict[str, Any]:
        assert isinstance(module, nn.EmbeddingBag)
        _refuse(module)
        if module.mode not in ("sum", "mean"):
            raise ValueError(f"mode={module.mode!r} is not supported; use 'sum' or 'mean'")
        return {
            "padding_idx": module.padding_idx,
            "mode": module.mode,
            "include_last_offset": module.include_last_offset,
        }

    def by_rows(self, activations: Any, batch: int) -> bool:
        # With offsets the lookups are one flat list, whose length may happen to be the batch.
        return activations[0].dim() == 2 and super().by_rows(activations, batch)

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        scaled = scale_rows(backprops, factors)
        rows, _, values = self._lookups(spec, activations, scaled)
        grad = values.new_zeros(spec.shapes["weight"]).index_add_(0, rows, values)
        return {"weight": grad.to(backprops.dtype)}

    def _lookups(
        self, spec: LayerSpec, activations: Any, backprops: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row, bag and gradient (at least fp32) of each lookup, flattened."""
        ids, *rest = activations
        bags = self._bags(spec, activations, backprops)
        ids = ids.reshape(-1)
        given = [t.reshape(-1) for t in rest if t.is_floating_point()]
        weights = widen(given[0] if given else backprops.new_ones(len(ids)))
        padding = spec.options["padding_idx"]
        counts = torch.ones_like(weights) if padding is None else (ids != padding).to(weights)
        weights = weights * counts
        if spec.options["mode"] == "mean":
            sizes = counts.new_zeros(len(backprops)).index_add_(0, bags, counts)
            weights = weights / sizes.clamp(min=1)[bags]
        return ids, bags, widen(backprops)[bags] * weights[:, None]

    def _bags(self, spec: LayerSpec, activations: Any, backprops: Tensor) -> Tensor:
        """``[N]`` bag of each lookup."""
        ids, *rest = activations
        if ids.dim() == 2 and len(ids) == len(backprops):
            return _samples(ids)
        offsets = [t for t in rest if not t.is_floating_point()]
        bags = len(offsets[0]) - spec.options["include_last_offset"] if offsets else -1
        if bags != len(backprops):
            raise unsupported(spec, activations, backprops, "its bags are not the samples")
        places = torch.arange(len(ids), device=ids.device)
        return torch.bucketize(places, offsets[0][:bags].long().contiguous(), right=True) - 1


def _samples(ids: Tensor) -> Tensor:
    """``[B, T] -> [B T]``, the sample of each entry."""
    samples = torch.arange(len(ids), device=ids.device)
    return samples[:, None].expand(ids.shape).reshape(-1)


def _per_sample(
    spec: LayerSpec, rows: Tensor, samples: Tensor, values: Tensor, batch: int
) -> Tensor:
    """``[B, V, d]``; what is looked up often is summed in at least fp32."""
    table, d = spec.shapes["weight"]
    places = samples * table + rows
    grad = values.new_zeros(batch * table, d)
    if wide_dtype(values) == values.dtype:
        grad.index_add_(0, places, values)
    elif len(values):
        # Only the lookups are held in the wide type, not the table.
        slots, _ = distinct_pairs(places, torch.zeros_like(places))
        sums = widen(values.new_zeros(values.shape)).index_add_(0, slots, widen(values))
        grad.index_copy_(0, places, sums[slots].to(values.dtype))
    return grad.view(batch, table, d)


def refuse_renormalised(module: nn.Module) -> None:
    """Refuse a table that its own forward pass changes, frozen or not, whichever rule it gets.

    Raises:
        ValueError: It has ``max_norm``.
    """
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise ValueError(
            "max_norm changes the table in the forward pass, depending on the data, without "
            "protection; build the layer without it"
        )


def _refuse(module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.scale_grad_by_freq:
        raise ValueError(
            "scale_grad_by_freq makes a sample's gradient depend on the other samples; build the "
            "layer without it"
        )
