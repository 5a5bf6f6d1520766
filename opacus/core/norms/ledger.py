"""Per-sample gradient norms from the records of one backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import sum_of_squares, sums_of_squares
from opacus.core.norms.grouping import by_input, by_layer, by_shape, small_by_rule
from opacus.core.platform.profiling import each_layer
from opacus.core.record.layers import Layer
from opacus.core.record.record import Record
from opacus.core.rules.base import pad_rows
from opacus.core.rules.spec import LayerSpec

# Per-sample gradients up to this size are kept, where the norm takes them anyway; larger ones
# if they are at most this share of the layer's activations and backprops.
FORMED_ELEMENTS = 1 << 18
FORMED_SHARE = 0.5
# Elements of per-sample gradients formed at once where they have to be summed
# over several uses (weight tying) before their norm is taken.
CHUNK_ELEMENTS = 1 << 26


class Storage(Protocol):
    """Decides what is kept of a record for the clipped sum."""

    def stores(self, record: Record) -> bool:
        """Whether its per-sample gradients are kept (else the record is)."""


class NormLedger:
    """Squared per-sample gradient norms of one batch, by parameter name.

    Immediate: the norm of a layer is computed as its record arrives, unless the
    layer is used more than once or shares a parameter; such records wait for each
    other, since the norm of a sum needs all its terms. Deferred: every record
    waits, and :meth:`finish` computes them all, small layers of equal shape in one
    batched call. Both give the same numbers.

    Args:
        batch: Number of samples B of the batch.
        deferred: Whether all records wait.
        budget_bytes: Memory that waiting records may hold; beyond it the oldest
            ones that can be computed alone are computed early.
        planner: Where there will be no second backward pass: decides whether a layer's
            per-sample gradients are kept or its records are. ``None``: records are
            dropped once their norm is known.
    """

    def __init__(
        self,
        batch: int,
        *,
        deferred: bool = False,
        budget_bytes: int | None = None,
        planner: Storage | None = None,
    ) -> None:
        self.batch = batch
        self.deferred = deferred
        self.budget_bytes = budget_bytes
        self.planner = planner
        # Per-sample gradients that are kept for the clipped sum.
        self.formed: dict[str, Tensor] = {}
        self.formed_layers: set[str] = set()
        # Records that are kept for it instead.
        self.held: list[Record] = []
        # Whether there were gradients of a lone sample, and whether there were records.
        self.whole = self.tapped = False
        self._norm_sq: dict[str, Tensor] = {}
        self._waiting: list[Record] = []
        self._done: set[str] = set()
        self._held_bytes = 0

    @property
    def waiting(self) -> list[Record]:
        """The records whose norm has not been computed yet."""
        return self._waiting

    def add(self, record: Record) -> None:
        """Take one record; see the class for when its norm is computed.

        Raises:
            RuntimeError: The layer's norm was already computed without this use.
        """
        name = record.spec.name
        self.tapped = True
        check_rows(record, self.batch)
        alone = not (record.reused or record.layer.shared)
        rule = record.layer.rule
        if rule.needs_parameters and not (rule.measures and alone):
            self._form(record)
            return
        if self.planner is not None and rule.needs_parameters:
            self._form(record)  # the parameters are at hand only now
        if self.planner is not None and rule.as_given and not alone and self.planner.stores(record):
            self._form(record)  # with logits that the backward pass forms in any case
            return
        if name in self._done:
            raise RuntimeError(
                f"layer '{name}' ({record.spec.kind.__name__}) was used again after its "
                "per-sample norm had been computed; set OPACUS_USE_DEFERRED_NORM=1 (or "
                "deferred_norm=True), which waits for all uses of a layer"
            )
        if alone and (rule.needs_parameters or not self.deferred):
            self._settle([record])
            return
        keep(record)
        self._waiting.append(record)
        self._held_bytes += _bytes_of(record)
        if self.budget_bytes is not None:
            self._shrink()

    def add_whole(self, grads: Mapping[str, Tensor]) -> None:
        """Take the gradients ``[*shape]`` of a batch of one sample, by parameter name."""
        self.whole = True
        for owner, grad in grads.items():
            dense = (grad.to_dense() if grad.is_sparse else grad).unsqueeze(0)
            known = self.formed.get(owner)
            self.formed[owner] = dense if known is None else known + dense

    def has_measured(self, layer: str) -> bool:
        """Whether the norm of a layer that stands alone is there already."""
        return layer in self._done or layer in self.formed_layers

    def known(self, owners: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The squared norms computed so far, of all parameters or of ``owners`` alone."""
        wanted = self._norm_sq.keys() | self.formed.keys() if owners is None else set(owners)
        formed = {o: sum_of_squares(self.formed[o]) for o in wanted & self.formed.keys()}
        return {**formed, **{o: self._norm_sq[o] for o in wanted & self._norm_sq.keys()}}

    def finish(self) -> dict[str, Tensor]:
        """Squared norms ``[B]`` (fp32 or fp64) by parameter name; forgets the records."""
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        if waiting:
            self._settle_waiting(waiting)
        left = [owner for owner in self.formed if owner not in self._norm_sq]
        norms = sums_of_squares([self.formed[owner] for owner in left])
        for owner, norm_sq in zip(left, norms, strict=True):
            self._accumulate(owner, norm_sq)
        return self._norm_sq

    def _settle_waiting(self, waiting: Sequence[Record]) -> None:
        """Norms of all records that waited, in as few calls as can be."""
        for record in waiting:
            check_unchanged(record)
        for record in waiting:  # a layer's gradients are formed in all uses, or in none
            if record.spec.name in self.formed_layers:
                self._form(record)
        waiting = [r for r in waiting if r.spec.name not in self.formed_layers]
        shared = [r for r in waiting if r.layer.shared]
        layers = by_layer(r for r in waiting if not r.layer.shared)
        alone = [uses[0] for uses in layers if len(uses) == 1]
        for records in by_shape(self._settle_sharing(self._settle_small(alone))):
            self._settle(records)
        for uses in layers:
            if len(uses) > 1:
                self._compute_uses(uses)
        if shared:
            self._compute_shared(shared)

    def _hold(self, records: Sequence[Record]) -> None:
        """Keep records for the clipped sum, if there will be no second backward pass."""
        if self.planner is not None:
            for record in records:
                keep(record)
            self.held += records

    # --- how one group is computed ---

    @each_layer
    def _settle(
        self, records: Sequence[Record], compute: Callable[[Sequence[Record]], None] | None = None
    ) -> None:
        """Norms of layers that stand alone; with a planner, also what is kept of each."""
        if self.planner is not None:
            for record in records:
                if self.planner.stores(record):
                    self._form(record)
            records = [r for r in records if r.spec.name not in self.formed_layers]
            records = [self._without_light(r) for r in records]
            self._hold(records)
        elif len(records) == 1 and _is_cheaply_formed(records[0]):
            self._form(records[0])
            self._done.add(records[0].spec.name)
            return
        if records:
            (compute or self._compute)(records)

    @each_layer
    def _form(self, record: Record) -> None:
        """Form a layer's per-sample gradients once and keep them for the clipped sum.

        Rules that re-run the layer need its parameters, which are unsharded only now,
        and may draw other random numbers when run again: what is summed must be what
        was measured.
        """
        rule = record.layer.rule
        self.formed_layers.add(record.spec.name)
        grads = rule.per_sample_grad(record.spec, record.activations, record.backprops)
        for local, grad in record.owned(grads).items():
            owner = record.layer.owners[local]
            known = self.formed.get(owner)
            self.formed[owner] = grad if known is None else add_rows(known, grad)

    def _without_light(self, record: Record) -> Record:
        """Form the light parameters' gradients of a record that is kept for the others.

        Their norms and sums are then taken together with those of all layers, in few launches.
        """
        rule, spec, layer = record.layer.rule, record.spec, record.layer
        light = tuple(name for name in rule.light if name in spec.params)
        rest = tuple(name for name in spec.params if name not in light)
        if not light or not rest or not rule.norm_is_local:
            return record
        grads = rule.per_sample_grad(layer.part(light), record.activations, record.backprops)
        for name, grad in grads.items():
            self.formed[layer.owners[name]] = grad
        return replace(record, spec=layer.part(rest))

    def _settle_small(self, records: list[Record]) -> list[Record]:
        """Small layers of any shapes in one launch, where there is a kernel; returns the rest."""
        groups, left = small_by_rule(records)
        for group in groups:
            rule = group[0].layer.rule
            uses = [(r.spec, r.activations, r.backprops) for r in group]
            norms = rule.norm_sq_of_many(uses) if len(group) > 1 else None
            if norms is None:
                left += group
                continue
            self._hold(group)
            self._take(group, norms)
        return left

    def _settle_sharing(self, records: Sequence[Record]) -> list[Record]:
        """Layers that read one input (query, key, value), a group at a time; returns the rest."""
        left: list[Record] = []
        for group in by_input(records):
            if len(group) == 1:
                left += group
                continue
            self._settle(group, self._compute_sharing)
        return left

    def _compute_sharing(self, records: Sequence[Record]) -> None:
        uses = [(r.spec, r.activations, r.backprops) for r in records]
        self._take(records, records[0].layer.rule.norm_sq_of_one_input(uses))

    def _take(self, records: Sequence[Record], norms: Sequence[dict[str, Tensor]]) -> None:
        for record, values in zip(records, norms, strict=True):
            self._done.add(record.spec.name)
            for name, value in values.items():
                self._add(record.layer, name, value)

    def _compute(self, records: Sequence[Record]) -> None:
        """Records of different layers but equal shape, in one call."""
        first = records[0]
        activations, backprops = first.activations, first.backprops
        if len(records) > 1:
            activations = tuple(
                torch.cat(tensors)
                for tensors in zip(*(r.activations for r in records), strict=True)
            )
            backprops = torch.cat([r.backprops for r in records])
        norm_sq = first.layer.rule.norm_sq(first.spec, activations, backprops)
        rows = first.batch
        for index, record in enumerate(records):
            self._done.add(record.spec.name)
            for name, value in norm_sq.items():
                own = value if len(records) == 1 else value[index * rows : (index + 1) * rows]
                self._add(record.layer, name, own)

    @each_layer
    def _compute_uses(self, records: Sequence[Record]) -> None:
        """Several uses of one layer: the norm of the sum of their gradients."""
        layer, spec = records[0].layer, records[0].spec
        joined = layer.rule.join(spec, [(r.activations, r.backprops) for r in records])
        if joined is None:
            return self._compute_shared(records)
        self._hold(records)
        self._done.add(spec.name)
        for name, value in layer.rule.norm_sq(spec, *joined).items():
            self._add(layer, name, value)

    @each_layer
    def _compute_shared(self, records: Sequence[Record]) -> None:
        """Parameters with several layers or uses: sum the per-sample gradients first."""
        self._hold(records)
        largest = max((_largest_parameter(r.spec) for r in records), default=1)
        rows = max(1, CHUNK_ELEMENTS // max(1, largest))
        parts: dict[str, list[Tensor]] = {}
        for start in range(0, max(1, self.batch), rows):  # once for an empty batch
            for name, grad in self._summed(records, start, min(start + rows, self.batch)).items():
                parts.setdefault(name, []).append(sum_of_squares(grad))
        for name, values in parts.items():
            self._accumulate(name, torch.cat(values))
        self._done.update(r.spec.name for r in records)

    def _summed(self, records: Sequence[Record], start: int, stop: int) -> dict[str, Tensor]:
        owners = {owner for r in records for owner in r.layer.owners.values()}
        total = {o: self.formed[o][start:stop] for o in owners & self.formed.keys()}
        for record in records:
            for local, grad in _per_sample_grad(record, start, stop).items():
                owner = record.layer.owners[local]
                total[owner] = add_rows(total[owner], grad) if owner in total else grad
        return total

    def _add(self, layer: Layer, local: str, norm_sq: Tensor) -> None:
        self._accumulate(layer.owners[local], norm_sq)

    def _accumulate(self, owner: str, norm_sq: Tensor) -> None:
        norm_sq = pad_rows(norm_sq, self.batch)  # rows beyond a packed sequence's end
        known = self._norm_sq.get(owner)
        self._norm_sq[owner] = norm_sq if known is None else known + norm_sq

    def _shrink(self) -> None:
        """Compute the oldest records that stand alone until the rest fits the budget."""
        index = 0
        while self._held_bytes > (self.budget_bytes or 0) and index < len(self._waiting):
            record = self._waiting[index]
            if record.reused or record.layer.shared:
                index += 1
                continue
            del self._waiting[index]
            self._held_bytes -= _bytes_of(record)
            check_unchanged(record)
            self._settle([record])


def add_rows(known: Tensor, grad: Tensor) -> Tensor:
    """Sum of two ``[B_k, ...]`` tensors whose rows start at the same sample."""
    if known.shape[0] == grad.shape[0]:
        return known + grad
    rows = max(known.shape[0], grad.shape[0])
    return pad_rows(known, rows) + pad_rows(grad, rows)


def total_norms(norm_sq: dict[str, Tensor], batch: int, device: torch.device) -> Tensor:
    """``[B]`` norms of the whole per-sample gradients."""
    if not norm_sq:
        return torch.zeros(batch, dtype=torch.float32, device=device)
    values = [value.to(device) for value in norm_sq.values()]
    return torch.stack(values).sum(0).sqrt()


def check_rows(record: Record, batch: int) -> None:
    """Refuse a record whose leading dimension is not the batch.

    Raises:
        ValueError: Names the layer. Mixing rows up would clip the wrong samples.
    """
    if record.batch == batch or (record.reused and record.batch < batch == record.rows):
        return
    raise ValueError(
        f"layer '{record.spec.name}' ({record.spec.kind.__name__}) saw {record.batch} rows in a "
        f"batch of {batch} samples, so its per-sample gradients are unknown. Let its input have "
        "the batch in its first dimension (expand position ids to [batch, length], say), or "
        "freeze the layer"
    )


def keep(record: Record) -> None:
    """The record is to be used once the backward pass has gone on."""
    record.hold()
    record.versions = [t._version for t in record.tensors]


def check_unchanged(record: Record) -> None:
    """Refuse a kept record whose tensors have been overwritten.

    Raises:
        RuntimeError: Names the layer. What is summed would not be what was measured.
    """
    if record.versions is not None and record.versions != [t._version for t in record.tensors]:
        raise RuntimeError(
            f"the input or the output gradient of {record.spec} was changed in place after the "
            "backward pass had come by (by a backward function that overwrites its gradient, or "
            "hooks that bring saved tensors back to one buffer). Use deferred_norm=False and a "
            "mode without _bk, in which nothing is kept"
        )


def _is_cheaply_formed(record: Record) -> bool:
    """Whether a norm takes small per-sample gradients, which a second pass need not form again."""
    rule, spec = record.layer.rule, record.spec
    most = max(FORMED_ELEMENTS, FORMED_SHARE * record.elements)
    return (
        rule.norm_is_local
        and not rule.needs_parameters
        and record.batch * spec.elements <= most
        and rule.forms_grads(spec, record.activations, record.backprops)
    )


def _per_sample_grad(record: Record, start: int, stop: int) -> dict[str, Tensor]:
    rule = record.layer.rule
    some = rule.cut(record.activations, record.backprops, start, stop)
    if some is not None:
        return rule.per_sample_grad(record.spec, *some)
    grads = rule.per_sample_grad(record.spec, record.activations, record.backprops)
    return {name: grad[start:stop] for name, grad in grads.items()}


def _bytes_of(record: Record) -> int:
    """Bytes that the record keeps alive beyond the graph: its backprops."""
    grads = record.backprops if isinstance(record.backprops, tuple) else (record.backprops,)
    return sum(g.numel() * g.element_size() for g in grads)


def _largest_parameter(spec: LayerSpec) -> int:
    return max((math.prod(spec.shapes[name]) for name in spec.params), default=1)
