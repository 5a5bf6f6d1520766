"""One backward pass: what the clipped sum needs is kept, not computed again.

Book-keeping (arXiv:2210.00038) keeps activations and backprops; storing forms the
per-sample gradient once and weights it later. The :class:`~opacus.core.sums.planner.Planner`
chooses for each layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opacus.core.platform.profiling import WEIGHTED_SUM, timed
from opacus.core.platform.sharded import compute_device
from opacus.core.privacy.clipping import Factors
from opacus.core.record.blocks import Blocks, replayable
from opacus.core.record.passes import ForwardPass
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder
from opacus.core.sums.planner import Planner
from opacus.core.sums.replay import Replay
from opacus.core.sums.seen import BLOCK_ADVICE, compared
from opacus.core.sums.strategy import Ghost, Phase
from opacus.core.sums.terms import KeptSums, LocalSink, WaitingSink, add_lone
from opacus.core.sums.weighting import Weighting


class OnePass(Ghost):
    """Norms and everything that the clipped sum needs, in a single backward pass.

    Guarantee: that of :class:`~opacus.core.sums.two_pass.TwoPass`. Where per-sample gradients
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
        sink: LocalSink | WaitingSink,
        **of_all: Any,
    ) -> None:
        super().__init__(recorder, parameters, **of_all)
        self.planner: Planner = Planner()
        self.sink = sink
        self.unreduced = sink.unreduced
        self._ranks = None if isinstance(sink, LocalSink) else sink  # that share the sums
        self._shared = False  # whether ranks run the same blocks
        self._again: Callable[[Record], None] | None = None
        self._layer_of = {o: x.spec.name for x in recorder.layers for o in x.owners.values()}

    def receive_formed(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """Take per-sample gradients ``[B, *shape]`` of a pass, by name, which have no records.

        Raises:
            ValueError: There is another number of losses.
        """
        if self.phase is Phase.IDLE:
            self.ordinary.receive_formed(forward_pass, grads)
        if self.phase is not Phase.NORMS:
            return
        assert self.ledger is not None
        self.summed.running.add(forward_pass)
        self.recorder.passes.join(forward_pass)
        self.ledger.take_formed(grads, {owner: self._layer_of[owner] for owner in grads})
        self.planner.held_bytes += sum([g.nbytes for g in grads.values()])
        if self.recorder.carried is not None:
            self.planner.report.choices.update(self.recorder.carried.choices)

    def go_on_from(self, other: Ghost) -> None:
        """See :meth:`Ghost.go_on_from`."""
        super().go_on_from(other)
        if other.planner is not None:
            self.planner.rounding = other.planner.rounding
            self.planner.host_budget = other.planner.host_budget

    def norm_pass(self, losses: Tensor, retain_graph: bool = False) -> None:
        """See :meth:`Ghost.norm_pass`; the graph is freed unless ``retain_graph``."""
        limits = self.limits
        held, peak = limits.now(losses.device)
        self.planner.start(
            held,
            peak,
            units=len(losses),
            in_sum=0 if peak is None else self.sink.bytes_needed,
            of_element=self.sink.bytes_of_element,
            spare=limits.spare,
            again=limits.again,
        )
        if self._ranks is not None:
            self._ranks.ask(self.planner.looks, limits.numbers)
        start, moments = moment(), self.planner.report.moments
        with self._running_out():
            super().norm_pass(losses, retain_graph)
        if self.planner.blocks is not None:
            self.planner.settled()
        carried, choices = self.recorder.carried, self.planner.report.choices
        if carried is not None and carried.learning and self.ledger is not None:
            carried.learn(self.summed.running, self.ledger.kept, choices)
        moments += [start, moment()]

    @contextmanager
    def _running_out(self) -> Iterator[None]:
        """After an error nothing is held for a replay; of memory, less is held the next time."""
        planner = self.planner
        try:
            yield
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                self.limits.ran_out(planner.held_bytes, planner.largest_block)
                planner.forget()
                lone = self.recorder.lone
                if lone is not None and lone.alive:
                    lone.rule_out("memory has run out")  # with taps less can be held
                if self.recorder.carried is not None:
                    self.recorder.carried.forget()
            if planner.blocks is not None:
                planner.blocks.start()
            raise

    def abandon(self) -> None:
        """See :meth:`Ghost.abandon`."""
        super().abandon()
        self.sink.abandon()

    @timed(WEIGHTED_SUM)
    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """Weight and add what was kept; runs no backward pass."""
        with self._running_out(), torch.no_grad():
            self._sum(clipped)
        self.planner.report.moments.append(moment())

    def _sum(self, clipped: Factors) -> None:
        assert self.ledger is not None
        kept = self.ledger.kept
        self.drop()
        if kept.lone and isinstance(self.sink, LocalSink):
            add_lone(kept.formed, clipped, self.parameters)
            return
        weighting = Weighting(clipped)
        sums, replay = KeptSums(kept, weighting), self._replay(weighting)
        names = [name for name, parameter in self.parameters if parameter.requires_grad]
        # What is held is of the last blocks: they go first, and sums grow as it shrinks. On all
        # ranks alike.
        names.reverse()
        for name, following in zip(names, [*names, ""][1:], strict=True):
            terms = sums.terms_of(name, () if replay is None else replay.terms_of(name))
            if sums.some_are_away:
                sums.fetch(following)
            self.sink.put(name, terms)
        self.sink.finish()
        self.doubt = compared(self.planner.seen, BLOCK_ADVICE)

    def _replay(self, weighting: Weighting) -> Replay | None:
        """The blocks that run again on any rank; ``None`` if none may."""
        blocks, anyone = self.planner.blocks, self.planner.looks
        if self._ranks is not None:
            anyone, least = self._ranks.hear()
            if self._shared:
                self.limits.agreed(least)
        if blocks is None or not anyone:
            return None
        visits, blocks.chosen = blocks.chosen, []
        wanted = {id(visit.block) for visit in visits}
        own = [id(block) in wanted for block in blocks.found]
        if self._ranks is not None:
            own = self._ranks.agree([b.owners for b in blocks.found], own)
        some = [block for block, yes in zip(blocks.found, own, strict=True) if yes]
        return Replay(some, visits, weighting, self.planner.seen, self._recording)

    @contextmanager
    def _recording(
        self, forward_pass: ForwardPass, take: Callable[[Record], None]
    ) -> Iterator[None]:
        """Layers are tapped as in a forward pass; what their backward brings is taken."""
        self._again, self.phase = take, Phase.SUM
        try:
            with self.recorder.backward(), self.recorder.passes.again(forward_pass):
                yield
        finally:
            self._again, self.phase = None, Phase.IDLE

    def _weigh(self, record: Record) -> None:
        if self._again is not None:
            self._again(record)

    def limit_memory(self, model: nn.Module) -> None:
        """See :meth:`Ghost.limit_memory`."""
        blocks, self.planner.blocks = self.planner.blocks, None
        if blocks is not None:
            blocks.remove()
        recorder, limits = self.recorder, self.limits
        devices = {compute_device(p).type for _, p in self.parameters}
        limits.default_peak = not self.deferred and "cuda" in devices
        # Ranks run the same collectives, whichever of them has a limit.
        self._shared = self.sink.shared
        limited = limits.default_peak or limits.limited or self._shared
        if limited and not self.deferred:
            self.planner.blocks = Blocks(recorder, replayable(model, recorder.layers))
            recorder.handles += self.planner.blocks.handles


def moment() -> Any:
    """Now, on the GPU if there is one; nothing waits for it."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
