"""One backward pass: what the clipped sum needs is kept, not computed again.

Book-keeping (arXiv:2210.00038) keeps activations and backprops; storing forms the
per-sample gradient once and weights it later. The :class:`~opacus.core.sums.planner.Planner`
chooses for each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from opacus.core.kernels.sums.weighted_sum import weighted_sum, weighted_sum_each
from opacus.core.norms.ledger import check_unchanged
from opacus.core.platform.profiling import WEIGHTED_SUM, each_layer, timed
from opacus.core.privacy.clipping import Factors
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder
from opacus.core.sums.planner import Planner, free_memory
from opacus.core.sums.strategy import Ghost
from opacus.core.sums.weighting import Weighting, add_to_grad

# Elements whose sums are formed, and reduced over ranks, together; a larger parameter alone.
BUCKET_ELEMENTS = 1 << 27


class GradientSink(Protocol):
    """Where the clipped sums go: to a parameter, or through a reduction over ranks."""

    def put(self, name: str, terms: Terms) -> None:
        """Take the terms whose sum is the gradient of parameter ``name``."""

    def finish(self) -> None:
        """All parameters have been put: set their ``grad``."""

    def abandon(self) -> None:
        """Drop what has been put since the latest :meth:`finish`, after an error."""


class Terms:
    """The terms of one parameter's clipped sum, evaluated when there is room for it.

    Args:
        stored: ``[B, *shape]`` per-sample gradients, or ``None``.
        later: Each gives one further term, of the parameter's shape, when called.
        factors: ``[B]`` clipping factors of this parameter.
        excluded: ``[B]`` bool, ``None`` if there are none.
    """

    __slots__ = ("excluded", "factors", "later", "stored")

    def __init__(
        self,
        stored: Tensor | None,
        later: Sequence[Callable[[], Tensor]],
        factors: Tensor,
        excluded: Tensor | None,
    ) -> None:
        self.stored = stored
        self.later = later
        self.factors = factors
        self.excluded = excluded

    def _stored_sum(self, stored: Tensor, out: Tensor | None = None) -> Tensor:
        rows = len(stored)
        excluded = None if self.excluded is None else self.excluded[:rows]
        return weighted_sum(stored, self.factors[:rows], excluded, out=out)

    def write(self, out: Tensor) -> None:
        """Write the sum to ``out``, whose elements are in the order of the parameter's."""
        first = self.stored is None
        if self.stored is not None:
            # A sampler may return a transpose.
            self._stored_sum(self.stored.reshape(len(self.stored), *out.shape), out)
        elif not self.later:
            out.zero_()
        for term in self.later:
            value = term().reshape(out.shape)
            out = out.copy_(value) if first else out.add_(value)
            first = False

    def value(self) -> Tensor | None:
        """The sum as a tensor of its own."""
        total = None if self.stored is None else self._stored_sum(self.stored)
        for term in self.later:
            total = term() if total is None else total + term()
        return total


class LocalSink:
    """Adds each sum to the parameter's ``grad`` on this process."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._waiting: list[tuple[str, Terms]] = []
        self._elements = 0

    def put(self, name: str, terms: Terms) -> None:
        if terms.stored is not None and not terms.later:
            self._waiting.append((name, terms))
            self._elements += self.parameters[name].numel()
            if self._elements > BUCKET_ELEMENTS:
                self.finish()
            return
        total = terms.value()
        if total is not None:
            self._add(name, total.to(self.parameters[name].dtype))

    def finish(self) -> None:
        """Form the sums that wait."""
        waiting, self._waiting, self._elements = self._waiting, [], 0
        if not waiting:
            return
        sums = weighted_sum_each(
            [terms.stored for _, terms in waiting if terms.stored is not None],
            [terms.factors for _, terms in waiting],
            waiting[0][1].excluded,
            [self.parameters[name].dtype for name, _ in waiting],
        )
        for (name, _), total in zip(waiting, sums, strict=True):
            self._add(name, total)

    def abandon(self) -> None:
        """See :class:`GradientSink`."""
        self._waiting, self._elements = [], 0

    def _add(self, name: str, total: Tensor) -> None:
        add_to_grad(self.parameters[name], total)


class OnePass(Ghost):
    """Norms and everything that the clipped sum needs, in a single backward pass.

    Guarantee: that of :class:`~opacus.core.sums.strategy.TwoPass`. Where per-sample gradients
    are stored, the numbers that are summed are the very ones that were measured.

    Memory: what is kept, see :class:`~opacus.core.sums.planner.Planner`; nothing outlives
    :meth:`sum_pass`.
    """

    retains_graph: ClassVar[bool] = False

    def __init__(
        self,
        recorder: Recorder,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        deferred: bool = False,
        budget_bytes: int | None = None,
        sink: GradientSink,
    ) -> None:
        super().__init__(recorder, parameters, deferred=deferred, budget_bytes=budget_bytes)
        self.planner: Planner = Planner()
        self.sink = sink

    def norm_pass(self, losses: Tensor, retain_graph: bool = False) -> None:
        """See :meth:`Ghost.norm_pass`; the graph is freed unless ``retain_graph``."""
        budget = self.held_budget
        self.planner.start(free_memory(losses.device) if budget is None else budget)
        super().norm_pass(losses, retain_graph)

    def abandon(self) -> None:
        """See :meth:`Ghost.abandon`."""
        super().abandon()
        self.sink.abandon()

    @timed(WEIGHTED_SUM)
    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """Weight and add what was kept; runs no backward pass."""
        with torch.no_grad():
            self._sum(clipped)

    def _sum(self, clipped: Factors) -> None:
        assert self.ledger is not None
        if self.ledger.whole:
            self._sum_whole(clipped)
            return
        ledger, self.ledger = self.ledger, None
        sums = _KeptSums(ledger.held, Weighting(clipped))
        ledger.held = []
        names = [name for name, parameter in self.parameters if parameter.requires_grad]
        factors = [clipped.of(name) for name in names]
        for name, own in zip(names, factors, strict=True):
            stored, later = ledger.formed.pop(name, None), sums.terms_of(name)
            self.sink.put(name, Terms(stored, later, own, clipped.masked))
        self.sink.finish()


class _KeptSums:
    """Weighted gradients of the kept records, each computed when first asked for."""

    def __init__(self, records: list[Record], weighting: Weighting) -> None:
        self.weighting = weighting
        self._by_owner: dict[str, list[Record]] = {}
        self._grads: dict[int, dict[str, Tensor]] = {}
        for record in records:
            for owner in {record.layer.owners[n] for n in record.spec.params}:
                self._by_owner.setdefault(owner, []).append(record)

    def terms_of(self, owner: str) -> list[Callable[[], Tensor]]:
        """The terms of parameter ``owner``."""
        records = self._by_owner.pop(owner, ())
        return [functools.partial(self._weighted, record, owner) for record in records]

    def _weighted(self, record: Record, owner: str) -> Tensor:
        owners = record.layer.owners
        names = [n for n in record.spec.params if owners[n] == owner]
        if id(record) not in self._grads:
            self._grads[id(record)] = self._of_layer(record)
        grads = self._grads[id(record)]
        first, *rest = [grads.pop(name) for name in names]
        for more in rest:
            first = first + more
        return first

    @each_layer
    def _of_layer(self, record: Record) -> dict[str, Tensor]:
        check_unchanged(record)
        return self.weighting.sums(record)
