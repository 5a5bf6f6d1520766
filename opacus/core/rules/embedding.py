"""Lookup tables: Embedding on ``[B, ...] -> [B, ..., d]``, and EmbeddingBag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.kernels.reference import table_norm_sq, widen
from opacus.core.rules.base import LayerRule, Use, as_tokens, join_tokens, scale_rows
from opacus.core.spec import LayerSpec


class EmbeddingRule(LayerRule):
    """Each lookup adds its backprop to a row of the table; the padding row gets none."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        assert isinstance(module, nn.Embedding)
        _refuse(module)
        return {"padding_idx": module.padding_idx}

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        ids, g = _lookups(spec, activations[0], backprops)
        batch, tokens, d = g.shape
        rows, _ = spec.shapes["weight"]
        # Accumulated wide: a token may occur often.
        grad = widen(g.new_zeros(batch * rows, d))
        places = ids + rows * torch.arange(batch, device=ids.device)[:, None]
        grad.index_add_(0, places.reshape(-1), widen(g).reshape(batch * tokens, d))
        return {"weight": grad.view(batch, rows, d).to(g.dtype)}

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        return {"weight": table_norm_sq(*_lookups(spec, activations[0], backprops))}

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        padding = spec.options["padding_idx"]
        grad = torch.ops.aten.embedding_dense_backward(
            scale_rows(backprops, factors),
            activations[0],
            spec.shapes["weight"][0],
            -1 if padding is None else padding,
            False,
        )
        return {"weight": grad}

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        ids, g = join_tokens([(a[0], b) for a, b in uses], (0, 1))
        return (ids,), g


class EmbeddingBagRule(LayerRule):
    """Sums or means of table rows; ``offsets`` or a two-dimensional input say which."""

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

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        ids, bags, weights = self._entries(spec, activations, backprops)
        rows, d = spec.shapes["weight"]
        batch = backprops.shape[0]
        entries = widen(backprops)[bags] * weights[:, None]
        grad = widen(backprops.new_zeros(batch * rows, d))
        grad.index_add_(0, bags * rows + ids, entries)
        return {"weight": grad.view(batch, rows, d).to(backprops.dtype)}

    def _entries(
        self, spec: LayerSpec, activations: Any, backprops: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row, bag and weight of each lookup, flattened."""
        ids, *rest = activations
        bags = self._bags(spec, ids, rest, backprops.shape[0])
        ids = ids.reshape(-1)
        given = [t for t in rest if t.is_floating_point()]
        weights = widen(given[0].reshape(-1) if given else backprops.new_ones(ids.numel()))
        padding = spec.options["padding_idx"]
        if padding is not None:
            weights = weights.masked_fill(ids == padding, 0.0)
        if spec.options["mode"] == "mean":
            counted = torch.ones_like(weights) if padding is None else (ids != padding).to(weights)
            sizes = counted.new_zeros(backprops.shape[0]).index_add_(0, bags, counted)
            weights = weights / sizes.clamp(min=1)[bags]
        return ids, bags, weights

    def _bags(self, spec: LayerSpec, ids: Tensor, rest: list[Tensor], batch: int) -> Tensor:
        if ids.dim() == 2:
            rows = torch.arange(batch, device=ids.device)
            return rows[:, None].expand(batch, ids.shape[1]).reshape(-1)
        offsets = next(t for t in rest if not t.is_floating_point())
        places = torch.arange(ids.shape[0], device=ids.device)
        return torch.bucketize(places, offsets[:batch], right=True) - 1


def _lookups(spec: LayerSpec, ids: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, T]`` and ``[B, T, d]``, without the padding row's share."""
    ids, g = as_tokens(ids, 0), as_tokens(backprops)
    padding = spec.options["padding_idx"]
    if padding is not None:
        g = g.masked_fill((ids == padding)[..., None], 0.0)
    return ids, g


def _refuse(module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise ValueError(
            "max_norm changes the table in the forward pass, depending on the data, without "
            "protection; build the layer without it"
        )
    if module.scale_grad_by_freq:
        raise ValueError(
            "scale_grad_by_freq makes a sample's gradient depend on the other samples; build the "
            "layer without it"
        )
