"""Two backward passes: the clipped sum is formed in the second one, nothing is kept.

Ghost clipping (arXiv:2110.05679, arXiv:2009.03106) finds the norms in the first.

Note [Several physical batches]
    Under FSDP2 the sums of physical batches wait unreduced where memory allows. Then FSDP2 finds no
    gradient in the second pass and reduces nothing; that of the last batch waits with them, and all
    are reduced as in one pass. Ranks agree on that before each second pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus.core.platform.profiling import SECOND_BACKWARD, each_layer, timed
from opacus.core.privacy.clipping import Factors
from opacus.core.record.record import Record
from opacus.core.sums.seen import REPLAY_ADVICE, Seen, compared
from opacus.core.sums.strategy import Ghost, Phase, run_backward
from opacus.core.sums.terms import Terms, WaitingSink, add_lone, add_to_grad
from opacus.core.sums.weighting import Weighting


class TwoPass(Ghost):
    """Norms in one backward pass, the clipped sum in a second one.

    The second pass is the first one again: the factors meet the rows of each layer, not the losses,
    and what a layer shows is compared with what was measured. In it FSDP2 finds in
    ``unsharded.grad`` exactly the clipped gradient to reduce. See :class:`Ghost` for the arguments.

    Guarantee: a sum of rows that are not those that were measured is never released. On the CPU
    that is an error at once; on a GPU, where looking would make the host wait, :attr:`doubt` says
    so to whoever releases.
    """

    _weighting: Weighting | None = None
    _seen: Seen
    sink: WaitingSink | None = None
    _holding = False  # whether the sums of the second pass that runs are not for FSDP2

    def let_wait(self, sink: WaitingSink) -> None:
        """Sums of physical batches that others follow may wait there; see the note above."""
        self.sink, self.unreduced = sink, sink.unreduced

    def leaves_gradients(self) -> bool:
        """See :meth:`Ghost.leaves_gradients`; ranks settle it where sums wait, or may."""
        self._holding = False
        if self._may_wait:
            assert self.sink is not None
            self.sink.hear()
            self._holding = self.sink.holding or self.sink.unreduced.waiting
        return not self._holding

    @property
    def _may_wait(self) -> bool:
        """Whether sums wait, or this batch's are wanted to: on all ranks alike."""
        unreduced = self.unreduced
        return unreduced is not None and (unreduced.wanted or unreduced.waiting)

    def _take(self, record: Record) -> None:
        super()._take(record)
        if self.phase is Phase.SUM:
            return
        ledger = self.ledger
        if ledger is not None and record.spec.name not in ledger.kept.layers:
            self._seen.measured(record)  # of the others the sum takes what was measured itself

    def norm_pass(self, losses: Tensor, retain_graph: bool = False) -> None:
        """See :meth:`Ghost.norm_pass`."""
        self._seen = Seen()
        if self._may_wait:
            assert self.sink is not None
            self.sink.ask(False, ())
        super().norm_pass(losses, retain_graph)

    @timed(SECOND_BACKWARD)
    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """The backward pass of ``losses`` again, weighted by layer; none of a lone sample."""
        if self.ledger is not None and self.ledger.kept.lone:
            add_lone(self.ledger.kept.formed, clipped, self.parameters)
            self.drop()
            return
        self._weighting = Weighting(clipped)
        try:
            with self._in(Phase.SUM, losses):
                run_backward(losses, retain_graph)
            self.doubt = compared(self._seen, REPLAY_ADVICE)
            if self._holding:
                self._pass_on(clipped)
        finally:
            self._weighting = self.ledger = None
            self._seen = Seen()

    @torch.no_grad()
    def _pass_on(self, clipped: Factors) -> None:
        """What waits goes on waiting, or is reduced: every trainable parameter, on every rank."""
        assert self.sink is not None
        trained = [name for name, parameter in self.parameters if parameter.requires_grad]
        for name in [] if self.sink.holding else reversed(trained):
            self.sink.put(name, Terms(None, (), clipped.of(name), None))
        self.sink.finish()

    def abandon(self) -> None:
        """See :meth:`Ghost.abandon`."""
        super().abandon()
        if self.sink is not None:
            self.sink.abandon()

    @each_layer
    def _weigh(self, record: Record) -> None:
        for name, grad in self._weighted(record).items():
            if self._holding:
                assert self.sink is not None
                self.sink.hold(record.layer.owners[name], grad)
                continue
            parameter = record.layer.parameter(name)
            assert parameter is not None
            add_to_grad(parameter, grad.to(parameter.dtype))

    def _weighted(self, record: Record) -> dict[str, Tensor]:
        """The clipped sums of one record of the replay, by local name."""
        weighting, ledger = self._weighting, self.ledger
        assert weighting is not None and ledger is not None
        if record.spec.name in ledger.kept.layers:
            owners = {name: record.layer.owners[name] for name in record.spec.params}
            formed = {name: ledger.kept.formed.pop(owner, None) for name, owner in owners.items()}
            return {
                name: weighting.sum_of_formed(owners[name], grad)  # each is used once
                for name, grad in formed.items()
                if grad is not None
            }
        self._seen.replayed(record)
        return weighting.sums(record)

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_weighting": None, "_holding": False, "doubt": None, "_seen": Seen()}
        return {**super().__getstate__(), **fresh}
