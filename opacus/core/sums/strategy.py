"""What strategies share that form the clipped sum without all per-sample gradients at once.

``TwoPass`` (``two_pass.py``) finds the norms in a first backward pass and forms the sum in a
second one. ``OnePass`` (``one_pass.py``) keeps what the sum needs, so that there is no second one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from opacus.core.norms.ledger import NormLedger, check_sizes
from opacus.core.platform.profiling import FIRST_BACKWARD, timed
from opacus.core.platform.saved_tensors import let_graphs_run_backward_twice
from opacus.core.privacy.clipping import Factors
from opacus.core.privacy.gradients import foreign_gradients, refuse_hooks, was_processed
from opacus.core.record.passes import ForwardPass
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder
from opacus.core.sums.limits import Limits
from opacus.core.sums.planner import Planner
from opacus.core.sums.summed import Summed
from opacus.core.sums.unreduced import Unreduced


class Phase(enum.Enum):
    """Where a two-pass step stands.

    IDLE: a backward pass now is not ours; its records are dropped, and since layers
        run on detached parameters it leaves no parameter gradient behind.
    NORMS: records become per-sample norms; no parameter gradient is formed.
    SUM: backprops are weighted by the clipping factors; records become gradients.
    """

    IDLE = "idle"
    NORMS = "norms"
    SUM = "sum"


class Ordinary(Protocol):
    """Takes what backward passes bring that are not ours."""

    def receive(self, record: Record) -> None:
        """A layer's record."""

    def receive_lone(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """The gradients of a batch of one sample, by parameter name."""

    def receive_formed(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """Per-sample gradients ``[B, *shape]`` that have no records, by parameter name."""


class Ghost:
    """Norms in a backward pass that forms no parameter gradient, then a clipped sum.

    Parameter gradients come from the rules alone, never from autograd: what was not
    seen cannot enter the sum. A trainable parameter whose gradient bypasses the taps is an error
    that names it.

    Args:
        recorder: Recorder whose sink is :meth:`receive`.
        parameters: All named parameters of the model, frozen ones too, as the optimizer
            holds them (under FSDP the sharded ones).
        deferred: Whether norms wait for the end of the backward pass.
        summed: What is in the parameters' gradients.
        ordinary: Takes what backward passes bring that are not ours.
    """

    # Whether the graph is needed again after the norm pass.
    retains_graph: ClassVar[bool] = True
    # Sums that wait for later batches, where they can.
    unreduced: Unreduced | None = None
    # What chooses how records are kept for the sum, where there is one backward pass.
    planner: Planner | None = None
    # Takes the record of a layer whose backward runs again for the sum.
    _weigh: Callable[[Record], None]
    # On a GPU: whether the latest sum is not of what was measured; None where that is known.
    doubt: Tensor | None = None

    def __init__(
        self,
        recorder: Recorder,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        deferred: bool,
        summed: Summed,
        ordinary: Ordinary,
    ) -> None:
        self.recorder = recorder
        if self.retains_graph:
            let_graphs_run_backward_twice()
            recorder.taps_in_graphs = False
        self.parameters = parameters
        self.deferred = deferred
        self.summed = summed
        self.ordinary = ordinary
        self.limits = Limits()
        self.phase = Phase.IDLE
        self.ledger: NormLedger | None = None

    def go_on_from(self, other: Ghost) -> None:
        """Take the place of another one, of the same model with fewer layers."""
        self.limits.go_on_from(other.limits)

    def limit_memory(self, model: nn.Module) -> None:
        """Blocks may have to run again, or not any more; only one pass keeps anything."""

    def receive(self, record: Record) -> None:
        """Sink of the recorder: measure, keep or weight a record, as the phase asks for."""
        if self.phase is Phase.IDLE:
            self.ordinary.receive(record)
        elif record.layer.rule.needs_parameters:
            with self.recorder.paused():  # such a rule may run the layer again
                self._take(record)
        else:
            self._take(record)

    def _take(self, record: Record) -> None:
        if self.phase is Phase.SUM:
            self._weigh(record)
            return
        assert self.ledger is not None
        if record.forward_pass is not None:
            self.summed.running.add(record.forward_pass)
        check_sizes(record)
        self.ledger.add(record)

    def receive_lone(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """Take the gradients of a batch of one sample; see :mod:`opacus.core.record.lone`."""
        if self.phase is Phase.NORMS:
            assert self.ledger is not None
            self.summed.running.add(forward_pass)
            self.ledger.kept.add_lone(grads)
        elif self.phase is Phase.IDLE:
            self.ordinary.receive_lone(forward_pass, grads)

    @timed(FIRST_BACKWARD)
    def norm_pass(self, losses: Tensor, retain_graph: bool = False) -> None:
        """Backward pass that fills :attr:`ledger` with the records of ``losses`` ``[B]``.

        Raises:
            RuntimeError: A gradient of a trainable parameter bypassed the taps, or these samples
                are in the clipped sum already.
        """
        refuse_hooks(self.parameters)
        for _, parameter in self.parameters:
            if parameter.grad is not None and was_processed(parameter.grad):
                parameter.grad = None  # of an earlier step, zeroed or not: nothing is added to it
        self.summed.running.clear()
        self.ledger = NormLedger(
            losses.shape[0],
            deferred=self.deferred,
            budget_bytes=self.limits.of_waiting(losses.device) if self.deferred else None,
            planner=self.planner,
        )
        trained = [(name, p) for name, p in self.parameters if p.requires_grad]
        before = _states_of_grads(trained)
        lone = self.recorder.ran_lone(losses)
        retain_graph = retain_graph or (self.retains_graph and not lone)
        with self._in(Phase.NORMS, losses, lone=lone):
            run_backward(losses, retain_graph)
        with torch.no_grad():
            self.ledger.measure_held()
        if before != (after := _states_of_grads(trained)):
            _refuse_leaks(self, [trained[i] for i, s in enumerate(after) if s != before[i]])
        self.summed.check()
        _note_samples(self, losses.shape[0])

    def leaves_gradients(self) -> bool:
        """Whether FSDP2, if it is there, finds gradients to reduce in the coming sum pass."""
        return False

    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """Add ``sum_i factors[i] * g_i`` to the parameters' ``grad``.

        Args:
            losses: ``[B]``, the same as in :meth:`norm_pass`.
            clipped: What the clip rule decided on the norms.
            retain_graph: Keep the graph for another backward pass.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """What is kept of the batch goes, which may be much."""
        self.ledger = None

    def abandon(self) -> None:
        """A sum pass failed: drop what it has left behind, and what it was added to."""
        self.drop()
        self.summed.begin()
        for layer in self.recorder.layers:
            for name in layer.spec.params:
                parameter = layer.parameter(name)  # under FSDP2 an unsharded one
                if parameter is not None:
                    parameter.grad = None
        for _, parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def _in(self, phase: Phase, losses: Tensor, *, lone: bool = False) -> Iterator[None]:
        self.phase = phase
        try:
            with self.recorder.backward(len(losses), lone=lone):
                yield
        finally:
            self.phase = Phase.IDLE

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ledger": None, "phase": Phase.IDLE}


def _note_samples(strategy: Ghost, samples: int) -> None:
    """What the norm pass has shown of batches of one sample."""
    lone, ledger = strategy.recorder.lone, strategy.ledger
    if lone is None or ledger is None:
        return
    if not ledger.kept.lone:
        lone.learn(strategy.summed.running, samples)
        return
    several = lone.several_rows(strategy.summed.running)
    reason = None
    if samples != 1:
        reason = f"the model was given one sample, but there are {samples} losses"
    elif ledger.tapped:
        reason = "layers were called outside the model's forward"
    elif several is not None:
        name, n = several
        reason = f"the model was given one sample, but layer '{name}' saw {n} rows"
    if reason is not None:
        lone.rule_out(reason)
        raise RuntimeError(
            f"{reason}, so per-sample gradients are unknown. Nothing was added to the model. "
            "From now on batches of one sample are treated like others: run the step again "
            "(OPACUS_LONE_SAMPLE=0 does so from the start)"
        )


def _refuse_leaks(strategy: Ghost, leaked: Sequence[tuple[str, nn.Parameter]]) -> None:
    for _, parameter in leaked:
        parameter.grad = None
    if (
        strategy.ledger is not None
        and strategy.ledger.kept.lone
        and strategy.recorder.lone is not None
    ):
        # By reentrant checkpoints, say, of which there were none before: not the next time.
        strategy.recorder.lone.rule_out("gradients came past the forward pass")
    raise foreign_gradients([name for name, _ in leaked])


def run_backward(losses: Tensor, retain_graph: bool) -> None:
    """The backward pass of per-sample losses.

    Raises:
        RuntimeError: A part of the graph can run backward only once.
    """
    try:
        losses.sum().backward(retain_graph=retain_graph)
    except RuntimeError as error:
        if "under selective activation checkpoint" not in str(error):
            raise
        raise RuntimeError(
            "what a selective activation checkpoint saves serves one backward pass only, and this "
            "mode takes two: use the mode with _bk at its end, which takes one, or checkpoint "
            "without a policy (context_fn)"
        ) from error


def _states_of_grads(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[int, int]]:
    """One for each, which changes when its gradient is assigned or modified in place."""
    grads = [parameter.grad for _, parameter in parameters]
    return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]
