"""One backward pass: what the clipped sum needs is kept, not computed again.

Book-keeping (arXiv:2210.00038) keeps activations and backprops; storing forms the
per-sample gradient once and weights it later. The :class:`~opacus.core.sums.planner.Planner`
chooses for each layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from opacus.core.kernels.sums.weighted_sum import weighted_sum, weighted_sum_each
from opacus.core.norms.ledger import check_unchanged
from opacus.core.platform.profiling import WEIGHTED_SUM, each_layer, timed
from opacus.core.privacy.clipping import excluded_or_none
from opacus.core.record.blocks import Blocks, replayable
from opacus.core.record.record import ForwardPass, Record
from opacus.core.record.recorder import Recorder
from opacus.core.sums.planner import Planner, free_memory
from opacus.core.sums.replay import Replay
from opacus.core.sums.seen import BLOCK_ADVICE, compared
from opacus.core.sums.strategy import Ghost, Phase
from opacus.core.sums.weighting import Weighting

# Elements whose sums are formed, and reduced over ranks, together; a larger parameter alone.
BUCKET_ELEMENTS = 1 << 27


class GradientSink(Protocol):
    """Where the clipped sums go: to a parameter, or through a reduction over ranks."""

    def put(self, name: str, terms: Terms) -> None:
        """Take the terms whose sum is the gradient of parameter ``name``."""

    def finish(self) -> None:
        """All parameters have been put: set their ``grad``."""

    def agree(self, blocks: Sequence[tuple[AbstractSet[str], bool]]) -> list[bool]:
        """Which blocks are replayed: parameters of each, and whether this process wants to."""

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

    def agree(self, blocks: Sequence[tuple[AbstractSet[str], bool]]) -> list[bool]:
        """See :class:`GradientSink`: what this process wants."""
        return [wanted for _, wanted in blocks]

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
        parameter = self.parameters[name]
        parameter.grad = total if parameter.grad is None else parameter.grad + total


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
        self._take: Callable[[Record], None] | None = None

    def norm_pass(self, losses: Tensor, retain_graph: bool = False) -> None:
        """See :meth:`Ghost.norm_pass`; the graph is freed unless ``retain_graph``."""
        budget, peak = self.held_budget, self.memory_budget
        if budget is None and peak is None:
            budget = free_memory(losses.device)
        self.planner.start(budget, peak)
        super().norm_pass(losses, retain_graph)

    def abandon(self) -> None:
        """See :meth:`Ghost.abandon`."""
        super().abandon()
        self.sink.abandon()

    @timed(WEIGHTED_SUM)
    def sum_pass(
        self,
        losses: Tensor,
        factors: Tensor | Mapping[str, Tensor],
        excluded: Tensor,
        retain_graph: bool = False,
    ) -> None:
        """Weight and add what was kept; runs no backward pass."""
        with torch.no_grad():
            self._sum(factors, excluded)

    def _sum(self, factors: Tensor | Mapping[str, Tensor], excluded: Tensor) -> None:
        assert self.ledger is not None
        if self.ledger.whole:
            self._sum_whole(factors, excluded)
            return
        ledger, self.ledger = self.ledger, None
        masked = excluded_or_none(excluded)
        weighting = Weighting(factors, masked)
        sums = _KeptSums(ledger.held, weighting)
        ledger.held = []
        replay = self._replay(weighting)
        for name, parameter in self.parameters:
            if not parameter.requires_grad:
                continue
            own = factors if isinstance(factors, Tensor) else factors.get(name)
            if own is None:  # a parameter without a norm took no part
                own = torch.zeros(len(excluded), dtype=torch.float32, device=excluded.device)
            stored = ledger.formed.pop(name, None)
            again = [] if replay is None else replay.terms_of(name)
            self.sink.put(name, Terms(stored, sums.terms_of(name) + again, own, masked))
        self.sink.finish()
        self.doubt = compared(self.planner.seen, BLOCK_ADVICE)

    def _replay(self, weighting: Weighting) -> Replay | None:
        """The blocks that run again; ``None`` if none may."""
        blocks = self.planner.blocks
        if blocks is None:
            return None
        visits, blocks.chosen = blocks.chosen, []
        wanted = {id(visit.block) for visit in visits}
        agreed = self.sink.agree([(b.owners, id(b) in wanted) for b in blocks.found])
        some = [block for block, yes in zip(blocks.found, agreed, strict=True) if yes]
        return Replay(some, visits, weighting, self.planner.seen, self._recording)

    @contextmanager
    def _recording(
        self, forward_pass: ForwardPass, take: Callable[[Record], None]
    ) -> Iterator[None]:
        """Layers are tapped as in a forward pass; what their backward brings is taken."""
        recorder = self.recorder
        self._take, recorder._current = take, forward_pass
        self.phase, recorder.in_backward = Phase.SUM, True
        try:
            yield
        finally:
            self._take, recorder._current = None, None
            self.phase, recorder.in_backward = Phase.IDLE, False

    def receive(self, record: Record) -> None:
        """Sink of the recorder."""
        if self.phase is Phase.SUM and self._take is not None:
            self._take(record)
        else:
            super().receive(record)

    def limit_memory(self, model: nn.Module) -> None:
        """A budget has been set or taken away: blocks may have to run again, or not any more."""
        blocks, self.planner.blocks = self.planner.blocks, None
        if blocks is not None:
            blocks.remove()
        limited = self.held_budget is not None or self.memory_budget is not None
        if limited and not self.deferred:
            recorder = self.recorder
            self.planner.blocks = Blocks(recorder, replayable(model, recorder.layers))
            recorder.handles += self.planner.blocks.handles


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
        grads = self._grads.setdefault(id(record), {})
        names = [n for n in record.spec.params if owners[n] == owner]
        for together in self.weighting.together(record):
            if names[0] in together and names[0] not in grads:
                grads |= self._of_layer(record, together)
        first, *rest = [grads.pop(name) for name in names]
        for more in rest:
            first = first + more
        return first

    @each_layer
    def _of_layer(self, record: Record, names: tuple[str, ...]) -> dict[str, Tensor]:
        check_unchanged(record)
        return self.weighting.sums(record, names)
