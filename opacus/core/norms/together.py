"""Norms of records that have waited for each other, in as few calls as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import sum_of_squares
from opacus.core.norms.grouping import (
    by_layer,
    by_shape,
    several_and_others,
    small_by_rule,
)
from opacus.core.norms.kept import Kept, add_rows
from opacus.core.norms.tied import Pair, norms_of, pairs_of
from opacus.core.platform.profiling import each_layer
from opacus.core.platform.sizes import CHUNK_ELEMENTS
from opacus.core.record.record import Record
from opacus.core.rules.spec import LayerSpec


class Known(Protocol):
    """Norms that are known; see :class:`~opacus.core.norms.ledger.SquaredNorms`."""

    def take(self, record: Record, norm_sq: dict[str, Tensor]) -> None:
        """The squared norms of a layer, by local name."""

    def measure(self, records: Sequence[Record]) -> None:
        """Measure layers that stand alone, whose rules take several at once."""

    def take_summed(self, records: Sequence[Record], norm_sq: dict[str, Tensor]) -> None:
        """Those of parameters of several layers or uses, by name in the model."""


class Ledger(Protocol):
    """Where norms go; see :class:`~opacus.core.norms.ledger.NormLedger`."""

    batch: int
    kept: Kept

    @property
    def norms(self) -> Known:
        """Those that are known."""

    def hold(self, records: Sequence[Record]) -> None:
        """Keep records for the clipped sum, if there will be no second backward pass."""

    def settle(self, records: Sequence[Record]) -> None:
        """Norms of layers that stand alone, and what is kept of them."""

    def forms(self, record: Record) -> bool:
        """Whether a layer's norm was left to per-sample gradients that were formed here."""


class Together:
    """Settles what has waited.

    Args:
        ledger: Where norms go.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def settle(self, waiting: Sequence[Record]) -> None:
        """Norms of all records that waited."""
        shared = [r for r in waiting if r.layer.shared]
        layers = by_layer(r for r in waiting if not r.layer.shared)
        alone = [uses[0] for uses in layers if len(uses) == 1]
        if alone:
            self.ledger.settle(alone)
        for uses in layers:
            if len(uses) > 1:
                self._uses(uses)
        if shared:
            self._shared(shared)

    def measure(self, records: Sequence[Record]) -> None:
        """Norms of layers that stand alone, in as few calls as possible."""
        if len(records) == 1:
            self._stacked(records)
            return
        several, others = several_and_others(self._small(records))
        if several:
            self.ledger.norms.measure(several)
        for group in by_shape(others):
            self._stacked(group)

    def _small(self, records: Sequence[Record]) -> list[Record]:
        """Small layers of any shapes in one launch, where there is a kernel; returns the rest."""
        groups, left = small_by_rule(records)
        for group in groups:
            rule = group[0].layer.rule
            uses = [(r.spec, r.activations, r.backprops) for r in group]
            norms = rule.norm_sq_of_many(uses) if len(group) > 1 else None
            if norms is None:
                left += group
            else:
                self._take(group, norms)
        return left

    def _take(self, records: Sequence[Record], norms: Sequence[dict[str, Tensor]]) -> None:
        for record, values in zip(records, norms, strict=True):
            self.ledger.norms.take(record, values)

    @each_layer
    def _stacked(self, records: Sequence[Record]) -> None:
        """Records of different layers but equal shape, in one call."""
        first, rows = records[0], records[0].batch
        if len(records) == 1 and self.ledger.forms(first):
            return
        activations, backprops = first.activations, first.backprops
        if len(records) > 1:
            tensors = zip(*(r.activations for r in records), strict=True)
            activations = tuple(torch.cat(several) for several in tensors)
            backprops = torch.cat([r.backprops for r in records])
        norm_sq = first.layer.rule.norm_sq(first.spec, activations, backprops)
        for index, record in enumerate(records):
            own = slice(index * rows, (index + 1) * rows) if len(records) > 1 else slice(None)
            self.ledger.norms.take(record, {name: value[own] for name, value in norm_sq.items()})

    @each_layer
    def _uses(self, records: Sequence[Record]) -> None:
        """Several uses of one layer: the norm of the sum of their gradients."""
        first = records[0]
        rule = first.layer.rule
        joined = rule.join(first.spec, [(r.activations, r.backprops) for r in records])
        if joined is None:
            return self._shared(records)
        self.ledger.hold(records)
        self.ledger.norms.take(first, rule.norm_sq(first.spec, *joined))

    def _shared(self, records: Sequence[Record]) -> None:
        """Parameters with several layers or uses."""
        pairs, left = pairs_of(records, self.ledger.kept.formed)
        for pair in pairs:
            self._tied([pair.table, pair.head], pair)
        if left:
            self._sums(left)

    @each_layer
    def _tied(self, records: Sequence[Record], pair: Pair) -> None:
        """A table's and a head's weight: their gradients are formed where terms have cancelled."""
        self.ledger.hold(records)
        weight, doubtful, others = norms_of(pair)
        for sample in [i for i, one in enumerate(doubtful.tolist()) if one]:
            grads = self._summed(records, sample, sample + 1)
            weight[sample] = sum_of_squares(grads[pair.owner])[0]
        self.ledger.norms.take_summed(records, {pair.owner: weight, **others})

    @each_layer
    def _sums(self, records: Sequence[Record]) -> None:
        """Sum the per-sample gradients first."""
        self.ledger.hold(records)
        largest = max((_largest_parameter(r.spec) for r in records), default=1)
        rows, batch = max(1, CHUNK_ELEMENTS // max(1, largest)), self.ledger.batch
        parts: dict[str, list[Tensor]] = {}
        for start in range(0, max(1, batch), rows):  # once for an empty batch
            for name, grad in self._summed(records, start, min(start + rows, batch)).items():
                parts.setdefault(name, []).append(sum_of_squares(grad))
        self.ledger.norms.take_summed(records, {name: torch.cat(v) for name, v in parts.items()})

    def _summed(self, records: Sequence[Record], start: int, stop: int) -> dict[str, Tensor]:
        formed = self.ledger.kept.formed
        owners = {owner for r in records for owner in r.layer.owners.values()}
        total = {o: formed[o][start:stop] for o in owners & formed.keys()}
        for record in records:
            for local, grad in _per_sample_grad(record, start, stop).items():
                owner = record.layer.owners[local]
                total[owner] = add_rows(total[owner], grad) if owner in total else grad
        return total


def _per_sample_grad(record: Record, start: int, stop: int) -> dict[str, Tensor]:
    rule = record.layer.rule
    some = rule.cut(record.activations, record.backprops, start, stop)
    if some is not None:
        return rule.per_sample_grad(record.spec, *some)
    grads = rule.per_sample_grad(record.spec, record.activations, record.backprops)
    return {name: grad[start:stop] for name, grad in grads.items()}


def _largest_parameter(spec: LayerSpec) -> int:
    return max((math.prod(spec.shapes[name]) for name in spec.params), default=1)
