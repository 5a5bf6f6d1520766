"""Gradients of units by any rule: those of rows, summed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import sum_of_squares, wide_dtype, widen
from opacus.core.platform.sizes import UNIT_ROWS_ELEMENTS
from opacus.core.rules.base import LayerRule, Use, unsupported
from opacus.core.rules.grouping import check_rows_of_units
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units


class UnitGradients(LayerRule):
    """The rule of a record that holds the units' gradients themselves.

    Activations are the gradients ``[n, *shape]``, in the order of ``spec.params``; backprops are
    ``[n]`` multipliers.
    """

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        return {
            name: grad * backprops.view(-1, *[1] * (grad.dim() - 1))
            for name, grad in self._named(spec, activations).items()
        }

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        square = backprops.square()
        grads = self._named(spec, activations)
        return {name: sum_of_squares(grad) * square for name, grad in grads.items()}

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        column = backprops if factors is None else backprops * factors.to(backprops.dtype)
        grads = self._named(spec, activations)
        return {
            name: (column @ grad.reshape(len(grad), math.prod(grad.shape[1:]))).view(grad.shape[1:])
            for name, grad in grads.items()
        }

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        total = [self.per_sample_grad(spec, *use) for use in uses]
        first, ones = total[0], uses[0][1].new_ones(uses[0][1].shape)
        return tuple(sum((t[n] for t in total[1:]), first[n]) for n in spec.params), ones

    def _named(self, spec: LayerSpec, activations: Any) -> dict[str, Tensor]:
        found = dict(zip(spec.shapes, activations, strict=True))
        return {name: found[name] for name in spec.params}


UNIT_GRADIENTS = UnitGradients()


class ReadParameter(UnitGradients):
    """The rule of a parameter that another module reads without a row for each sample.

    What comes back to it are the samples' gradients; see :mod:`opacus.core.record.shared`.
    """

    batch_leads = True


READ = ReadParameter()


def given(spec: LayerSpec) -> LayerSpec:
    """The spec of a record that :func:`gradients_by_unit` makes of one with ``spec``."""
    return replace(spec, shapes={name: spec.shapes[name] for name in spec.params})


def gradients_by_unit(
    rule: LayerRule, spec: LayerSpec, activations: Any, backprops: Any, units: Units
) -> Use:
    """The units' gradients by any rule, for :class:`UnitGradients`: rows first, then their sums.

    Args:
        rule: Gives the gradients of rows.
        spec: The layer.
        activations: Its inputs, with R rows.
        backprops: Gradient with respect to its output, with R rows.
        units: Of the rows.

    Raises:
        ValueError: There are several units in a row, or rows of nobody have a gradient.
    """
    first = backprops[0] if isinstance(backprops, tuple) else backprops
    rows = first.shape[0]
    try:
        check_rows_of_units(first, first.shape[:1], units)
    except ValueError as error:
        raise unsupported(spec, activations, backprops, str(error)) from None
    own = rule.of_units(spec, activations, backprops, units)
    if own is not None:
        own_grads = tuple(widen(own[name]) for name in spec.params)
        return own_grads, own_grads[0].new_ones(units.count)
    slots = _slots(units, first)
    sums: dict[str, Tensor] = {}
    for part, grads in _gradients_of_rows(rule, spec, activations, backprops, rows):
        for name, grad in grads.items():
            if name not in sums:
                shape = (units.count + 1, *grad.shape[1:])
                sums[name] = grad.new_zeros(shape, dtype=wide_dtype(grad))
            sums[name].index_add_(0, slots[part], widen(grad))
    by_unit = tuple(sums[name][: units.count] for name in spec.params)
    return by_unit, by_unit[0].new_ones(units.count)


def _gradients_of_rows(
    rule: LayerRule, spec: LayerSpec, activations: Any, backprops: Any, rows: int
) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Gradients of some rows at a time, where the rule's rows can be cut out."""
    step = max(1, UNIT_ROWS_ELEMENTS // max(1, spec.elements))
    if rows <= step or not isinstance(backprops, Tensor) or not rule.by_rows(activations, rows):
        yield slice(rows), rule.per_sample_grad(spec, activations, backprops)
        return
    for start in range(0, rows, step):
        part = slice(start, start + step)
        some = tuple(a[part] for a in activations)
        yield part, rule.per_sample_grad(spec, some, backprops[part])


def _slots(units: Units, like: Tensor) -> Tensor:
    """``[R]``: the unit of each row, n for nobody."""
    if units.block is not None:
        return torch.arange(units.count, device=like.device).repeat_interleave(units.block)
    ids = units.over(like.shape[:1], like.device)
    return ids.where(ids >= 0, units.count)
