"""Per-sample gradient norms from the records of one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from opacus.core.kernels.sums.float8 import Rounded
from opacus.core.norms.kept import Kept, Queue
from opacus.core.norms.together import Together
from opacus.core.platform.profiling import each_layer
from opacus.core.platform.sizes import FORMED_ELEMENTS, FORMED_SHARE, MEASURED_TOGETHER
from opacus.core.platform.torch_internals import stream_number
from opacus.core.record.blocks import Visit
from opacus.core.record.record import Record
from opacus.core.rules.base import pad_rows


class Storage(Protocol):
    """Decides what is kept of a record for the clipped sum."""

    def stores(self, record: Record) -> bool:
        """Whether its per-sample gradients are kept (else the record is)."""

    @property
    def rounding(self) -> Callable[[str, Tensor], Rounded | None] | None:
        """Stores a parameter's gradients in fewer bits."""

    @property
    def looks(self) -> bool:
        """Whether blocks of this step may be left to a replay."""

    def replays(self, record: Record) -> Visit | None:
        """The run of its block that is repeated, so that nothing of it is kept."""

    def leaving(self) -> Visit | None:
        """The run of a block whose records are sent to host memory."""

    def visited(self, record: Record) -> None:
        """Its norm is known, or will be."""


class SquaredNorms:
    """Squared norms ``[B]`` of the layers that have been measured, by parameter.

    Args:
        batch: Number of samples B.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.by_owner: dict[str, Tensor] = {}
        self.layers: set[str] = set()

    def take(self, record: Record, norm_sq: dict[str, Tensor]) -> None:
        """The squared norms of a layer, by local name."""
        self.layers.add(record.spec.name)
        for name, value in norm_sq.items():
            self.add(record.layer.owners[name], value)

    @each_layer
    def measure(self, records: Sequence[Record]) -> None:
        """Measure layers that stand alone, whose rules take several at once."""
        rules: dict[int, list[Record]] = {}
        for record in records:
            rules.setdefault(id(record.layer.rule), []).append(record)
        for own in rules.values():
            uses = [(r.spec, r.activations, r.backprops) for r in own]
            norms = own[0].layer.rule.norm_sq_of_several(uses)
            for record, norm_sq in zip(own, norms, strict=True):
                self.take(record, norm_sq)

    def take_summed(self, records: Sequence[Record], norm_sq: dict[str, Tensor]) -> None:
        """Those of parameters of several layers or uses, by name in the model."""
        for owner, value in norm_sq.items():
            self.add(owner, value)
        self.layers.update(record.spec.name for record in records)

    def add(self, owner: str, norm_sq: Tensor) -> None:
        """One more part of a parameter's gradients has been measured."""
        if norm_sq.shape[0] != self.batch:  # rows beyond a packed sequence's end
            norm_sq = pad_rows(norm_sq, self.batch)
        known = self.by_owner.get(owner)
        self.by_owner[owner] = norm_sq if known is None else known + norm_sq


class NormLedger:
    """Squared per-sample gradient norms of one batch, by parameter name.

    Immediate: the norm of a layer is computed as its record arrives, unless the
    layer is used more than once or shares a parameter; such records wait for each
    other, since the norm of a sum needs all its terms. Those that are held for the sum in
    any case wait for a few more, with which they take fewer launches. Deferred: every record
    waits, and :meth:`finish` computes them all, small layers of equal shape in one
    batched call. All give the same numbers.

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
        self.planner = planner
        self.norms = SquaredNorms(batch)
        self.kept = Kept()
        self._queue = Queue(budget_bytes)
        # Of what is held, by stream: another one may come to a record before its tensors are there.
        self._unmeasured: dict[tuple[torch.device, int], list[Record]] = {}

    @property
    def waiting(self) -> list[Record]:
        """The records whose norm has not been computed yet."""
        return self._queue.records

    @property
    def tapped(self) -> bool:
        """Whether there were records."""
        return bool(self.norms.layers or self.kept.layers or self._queue.records)

    def add(self, record: Record) -> None:
        """Take one record; see the class for when its norm is computed.

        Raises:
            RuntimeError: The layer's norm was already computed without this use.
        """
        name, rule, planner = record.spec.name, record.layer.rule, self.planner
        check_rows(record, self.batch)
        alone = not (record.reused or record.layer.shared)
        # A use that a reentrant checkpoint had hidden, after one that was stored.
        more = planner if alone and name in self.kept.layers else None
        adds_up = more is not None and more.rounding is None  # what is rounded cannot be added to
        if adds_up or (rule.needs_parameters and not (rule.measures and alone)):
            self.kept.form(record)
            return
        if planner is not None and rule.needs_parameters:
            self.kept.form(record)  # the parameters are at hand only now
        if planner is not None and rule.as_given and not alone and planner.stores(record):
            self.kept.form(record)  # with logits that the backward pass forms in any case
            return
        if more is not None or name in self.norms.layers:
            raise used_again(f"layer '{name}' ({record.spec.kind.__name__})")
        if alone and (rule.needs_parameters or not self.deferred):
            self.settle([record])
            return
        for oldest in self._queue.put(record):
            self.settle([oldest])

    def take_formed(self, grads: Mapping[str, Tensor], layer_of: Mapping[str, str]) -> None:
        """Take per-sample gradients ``[B, *shape]`` by parameter name, which had no records.

        Args:
            grads: Of all uses of these parameters in a forward pass.
            layer_of: The layer of each.

        Raises:
            RuntimeError: A parameter's norm was already computed without these.
            ValueError: There is another number of losses.
        """
        for owner, grad in grads.items():
            if grad.shape[0] != self.batch:
                raise other_rows(f"layer '{layer_of[owner]}'", grad.shape[0], self.batch)
            if owner in self.norms.by_owner or layer_of[owner] in self.norms.layers:
                # Of a use that a reentrant checkpoint had hidden.
                raise used_again(f"layer '{layer_of[owner]}'")
        self.kept.add_formed(grads, layer_of.values())

    def has_measured(self, layer: str) -> bool:
        """Whether the norm of a layer that stands alone is there already."""
        return layer in self.norms.layers or layer in self.kept.layers

    def known(self, owners: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The squared norms computed so far, of all parameters or of ``owners`` alone."""
        known = self.norms.by_owner
        wanted = known.keys() | self.kept.formed.keys() if owners is None else set(owners)
        measured = {o: known[o] for o in wanted & known.keys()}
        return {**self.kept.squares(wanted), **measured}

    def finish(self) -> dict[str, Tensor]:
        """Squared norms ``[B]`` (fp32 or fp64) by parameter name; forgets the records."""
        if self._queue.records:
            waiting = self._queue.empty()
            for record in waiting:  # a layer's gradients are formed in all uses, or in none
                if record.spec.name in self.kept.layers:
                    self.kept.form(record)
            Together(self).settle([r for r in waiting if r.spec.name not in self.kept.layers])
        self.measure_held()  # also what came out of the queue
        left = [owner for owner in self.kept.formed if owner not in self.norms.by_owner]
        for owner, norm_sq in self.kept.squares(left).items():
            self.norms.add(owner, norm_sq)
        _check_measured(self.kept.held, self.norms.by_owner)
        return self.norms.by_owner

    def hold(self, records: Sequence[Record]) -> None:
        """Keep records for the clipped sum, if there will be no second backward pass."""
        if self.planner is None:
            return
        for record in records:
            record.keep()
        self.kept.held += records

    def settle(self, records: Sequence[Record]) -> None:
        """Norms of layers that stand alone; with a planner, also what is kept of each.

        Args:
            records: Of different layers.
        """
        planner = self.planner
        if planner is None:
            Together(self).measure(records)
            return
        if planner.looks:
            _settle_blocks(self, planner, records)
            return
        held = _keep(self, planner, records)
        if self.deferred:
            Together(self).measure(held)
            return
        for record in held:
            if not record.layer.rule.takes_several:
                self.norms.measure([record])
                continue
            on = record.device
            place = on, stream_number(on.index) if on.type == "cuda" else 0
            waiting = self._unmeasured.setdefault(place, [])
            waiting.append(record)
            if len(waiting) >= MEASURED_TOGETHER:
                self.norms.measure(self._unmeasured.pop(place))

    def measure_held(self) -> None:
        """Norms of the layers that wait though they are held for the sum; no more come."""
        while self._unmeasured:
            self.norms.measure(self._unmeasured.popitem()[1])

    def forms(self, record: Record) -> bool:
        """Form small per-sample gradients, if they alone are kept for a second pass."""
        formed = self.planner is None and _is_cheaply_formed(record)
        if formed:
            self.kept.form(record)
            self.norms.layers.add(record.spec.name)
        return formed


def _check_measured(held: Iterable[Record], norm_sq: Mapping[str, Tensor]) -> None:
    """Nothing may be summed that was not measured."""
    for record in held:
        for name in record.spec.params:
            if record.layer.owners[name] not in norm_sq:
                raise RuntimeError(
                    f"{record.spec} was not measured, though it is to be summed. Nothing of this "
                    "batch was added to the model; please report this"
                )


def _keep(
    ledger: NormLedger, planner: Storage, records: Sequence[Record], may_be_dropped: bool = False
) -> list[Record]:
    """Keep records for the sum, or per-sample gradients instead; returns what is to be measured."""
    kept = ledger.kept
    for record in records:
        if planner.stores(record):
            kept.form(record, planner.rounding, may_be_dropped)
    held = [_form_light(r, kept.formed) for r in records if r.spec.name not in kept.layers]
    kept.held += held
    for record in held:
        record.keep()
        ledger.norms.layers.add(record.spec.name)  # no other use may come any more
    return held


def _settle_blocks(ledger: NormLedger, planner: Storage, records: Sequence[Record]) -> None:
    """Settle where blocks may run again or leave: each norm must be there before they do."""
    here = [r for r in records if not _left_to_a_replay(ledger, planner, r)]
    Together(ledger).measure(_keep(ledger, planner, here, may_be_dropped=True))
    visit = planner.leaving()
    if visit is not None:
        for owner, norm_sq in ledger.kept.send_away(visit.names, visit.owners).items():
            ledger.norms.add(owner, norm_sq)


def _left_to_a_replay(ledger: NormLedger, planner: Storage, record: Record) -> bool:
    """Whether a record was measured and is not kept, for its block runs again."""
    visit = planner.replays(record)
    if visit is not None:
        for owner, norm_sq in ledger.kept.drop(visit.names, visit.owners).items():
            ledger.norms.add(owner, norm_sq)
        Together(ledger).measure([record])
    planner.visited(record)
    return visit is not None


def _form_light(record: Record, formed: dict[str, Tensor]) -> Record:
    """Form the light parameters' gradients of a record that is kept for the others.

    Their norms and sums are then taken together with those of all layers, in few launches.

    Returns:
        The record for the others.
    """
    rule, spec, layer = record.layer.rule, record.spec, record.layer
    if not rule.light or not rule.norm_is_local:
        return record
    light, rest = layer.splits.get(spec.params) or layer.split(spec.params)
    if not light.params or not rest.params:
        return record
    grads = rule.per_sample_grad(light, record.activations, record.backprops)
    for name, grad in grads.items():
        formed[layer.owners[name]] = grad
    record = copy(record)
    record.spec = rest
    return record


def total_norms(norm_sq: dict[str, Tensor], batch: int, device: torch.device) -> Tensor:
    """``[B]`` norms of the whole per-sample gradients."""
    if not norm_sq:
        return torch.zeros(batch, dtype=torch.float32, device=device)
    return stacked(norm_sq, device).sum(0).sqrt()


def stacked(norm_sq: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """``[P, B]`` of P values ``[B]``, which may lie on several devices."""
    values = [v if v.device == device else v.to(device) for v in norm_sq.values()]
    return torch.stack(values)


def check_rows(record: Record, batch: int) -> None:
    """Refuse a record whose leading dimension is not the batch.

    Raises:
        ValueError: Names the layer. Mixing rows up would clip the wrong samples.
    """
    if record.batch == batch or (record.reused and record.batch < batch == record.rows):
        return
    raise other_rows(str(record.spec), record.batch, batch)


def used_again(layer: str) -> RuntimeError:
    """The error for a use of a layer that comes too late for its norm."""
    return RuntimeError(
        f"{layer} was used again after its per-sample norm had been computed; set "
        "OPACUS_USE_DEFERRED_NORM=1 (or deferred_norm=True), which waits for all uses of a layer"
    )


def other_rows(layer: str, rows: int, batch: int) -> ValueError:
    """The error for a layer with another number of rows than there are samples."""
    return ValueError(
        f"{layer} saw {rows} rows in a "
        f"batch of {batch} samples, so its per-sample gradients are unknown. Let its input have "
        "the batch in its first dimension (expand position ids to [batch, length], say), or "
        "freeze the layer. If there are not that many samples, correct criterion(..., shape=)"
    )


def check_sizes(record: Record) -> None:
    """Refuse a layer with rows that cannot be the samples that the model was given.

    Raises:
        ValueError: Names the layer, with both numbers: see :func:`possible_batches`.
    """
    sizes = record.forward_pass.sizes if record.forward_pass is not None else frozenset()
    if not sizes or record.rows in sizes:
        return
    batch = " or ".join(str(n) for n in sorted(sizes))
    raise ValueError(
        f"{record.spec} saw {record.rows} rows in a batch of {batch} samples, as many as the "
        "model's inputs have, so it would be clipped by row (token, position, half of a pair) "
        "instead of by sample. Let its input have the batch in its first dimension: [batch, "
        "length, ...] instead of [batch * length, ...], positions expanded to [batch, length], "
        "pairs stacked in a new dimension instead of joined along the batch. If the model is "
        "time-major, use batch_first=False. Or freeze the layer. Nothing of this batch was added "
        "to the model"
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
