"""What strategies share that form the clipped sum without all per-sample gradients at once.

``TwoPass`` (``two_pass.py``) finds the norms in a first backward pass and forms the sum in a
second one. ``OnePass`` (``one_pass.py``) keeps what the sum needs, so that there is no second one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opacus.core.kernels.sums.weighted_sum import scale_in_place, weighted_sum_each
from opacus.core.norms.ledger import NormLedger, check_sizes
from opacus.core.platform.profiling import FIRST_BACKWARD, timed
from opacus.core.privacy.clipping import Factors
from opacus.core.privacy.gradients import foreign_gradients, refuse_hooks, was_processed
from opacus.core.record.record import ForwardPass, Record
from opacus.core.record.recorder import Recorder
from opacus.core.sums.limits import Limits
from opacus.core.sums.planner import Planner
from opacus.core.sums.terms import add_to_grad
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


class Summed:
    """Which forward passes a clipped sum is of: each once, and no other loss asks of them.

    Attributes:
        running: Forward passes that the running norm pass has come to.
    """

    def __init__(self) -> None:
        self.running: set[ForwardPass] = set()
        self._known: set[ForwardPass] = set()

    def begin(self) -> None:
        """The parameters' ``grad`` are not in use: no sample has been summed yet."""
        self._known.clear()

    def finish(self) -> None:
        """The clipped sum of the latest norm pass is in the parameters' ``grad``."""
        self._known.update(self.running)

    def note_ordinary(self, forward_pass: ForwardPass, parameters: Sequence[str]) -> None:
        """A loss that is not the criterion's runs backward through a forward pass.

        Raises:
            RuntimeError: The clipped sum has samples of that pass already.
        """
        forward_pass.ordinary = parameters = tuple(parameters)
        if forward_pass in self._known:
            self._refuse_second_loss(parameters)

    def check(self) -> None:
        """The norm pass has run, and its samples are to be summed.

        Raises:
            RuntimeError: Some are in the sum already, or another loss asks something of them.
        """
        for forward_pass in self.running:
            if forward_pass.ordinary:
                self._refuse_second_loss(forward_pass.ordinary)
        if self.running & self._known:
            raise RuntimeError(
                "these samples have been clipped and summed already; a second backward() would let "
                "each of them count twice. Add the losses of one forward pass and call backward() "
                "once, or call optimizer.step() or zero_grad() in between. Nothing was added to "
                "the model"
            )

    def _refuse_second_loss(self, parameters: Sequence[str]) -> None:
        raise RuntimeError(
            f"a loss that the private criterion did not make ran backward through {parameters[0]} "
            "and other private parameters, on samples that are in the step: what it "
            "asks of them is not clipped and would be left out. Give the criterion all losses "
            "(one a sample), or make a second one by DPLossFastGradientClipping(module, optimizer, "
            "other_criterion, loss_reduction), and call backward() on their sum"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"running": set(), "_known": set()}


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
        budget_bytes: See :class:`~opacus.core.norms.ledger.NormLedger`; by default
            :func:`default_budget`.
    """

    # Whether the graph is needed again after the norm pass.
    retains_graph: ClassVar[bool] = True
    # Sums that wait for later batches, where they can.
    unreduced: Unreduced | None = None
    # On a GPU: whether the latest sum is not of what was measured; None where that is known.
    doubt: Tensor | None = None

    def __init__(
        self,
        recorder: Recorder,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        deferred: bool = False,
        budget_bytes: int | None = None,
    ) -> None:
        self.recorder = recorder
        if self.retains_graph:  # compiled graphs with buffers to give away run backward only once
            recorder.taps_in_graphs = False
        self.parameters = parameters
        self.deferred = deferred
        self.budget_bytes = budget_bytes
        self.planner: Planner | None = None
        self.limits = Limits()
        self.phase = Phase.IDLE
        self.ledger: NormLedger | None = None
        self.summed = Summed()
        self._ordinary: Callable[[Record], None] | None = None
        self._ordinary_whole: Callable[[ForwardPass, Mapping[str, Tensor]], None] | None = None

    def go_on_from(self, other: Ghost) -> None:
        """Take the place of another one, of the same model with fewer layers."""
        self.budget_bytes = other.budget_bytes
        self.limits.go_on_from(other.limits)
        if self.planner is not None and other.planner is not None:
            self.planner.rounding = other.planner.rounding
            self.planner.host_budget = other.planner.host_budget
        self.summed = other.summed

    def limit_memory(self, model: nn.Module) -> None:
        """Blocks may have to run again, or not any more; only one pass keeps anything."""

    def watch_ordinary(
        self,
        sink: Callable[[Record], None],
        whole: Callable[[ForwardPass, Mapping[str, Tensor]], None],
    ) -> None:
        """Records of backward passes that are not ours, and gradients of lone samples, go there."""
        self._ordinary, self._ordinary_whole = sink, whole

    def receive(self, record: Record) -> None:
        """Sink of the recorder: measure, keep or weight a record, as the phase asks for."""
        if self.phase is Phase.IDLE:
            if self._ordinary is not None:
                self._ordinary(record)
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

    def _weigh(self, record: Record) -> None:
        """A layer's backward runs again for the sum."""
        raise NotImplementedError

    def receive_whole(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """Take the gradients of a batch of one sample; see :mod:`opacus.core.record.whole`."""
        if self.phase is Phase.NORMS:
            assert self.ledger is not None
            self.summed.running.add(forward_pass)
            self.ledger.kept.add_whole(grads)
        elif self.phase is Phase.IDLE and self._ordinary_whole is not None:
            self._ordinary_whole(forward_pass, grads)

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
        budget = self.budget_bytes
        if budget is None and self.deferred:  # else nothing waits that could be computed early
            budget = default_budget(losses.device)
        self.ledger = NormLedger(
            losses.shape[0],
            deferred=self.deferred,
            budget_bytes=budget,
            planner=self.planner,
        )
        before = {name: _state_of_grad(p) for name, p in self.parameters}
        lone = self.recorder.ran_bare(losses)
        retain_graph = retain_graph or (self.retains_graph and not lone)
        with self._in(Phase.NORMS, losses, bare=lone):
            run_backward(losses, retain_graph)
        _refuse_leaks(self, before)
        self.summed.check()
        _note_samples(self, losses.shape[0])

    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """Add ``sum_i factors[i] * g_i`` to the parameters' ``grad``.

        Args:
            losses: ``[B]``, the same as in :meth:`norm_pass`.
            clipped: What the clip rule decided on the norms.
            retain_graph: Keep the graph for another backward pass.
        """
        raise NotImplementedError

    @torch.no_grad()
    def _sum_whole(self, clipped: Factors) -> None:
        """Weight the gradient of a lone sample: there is nothing to run again, or to add up."""
        assert self.ledger is not None
        formed, self.ledger = self.ledger.kept.formed, None
        used = [(name, parameter) for name, parameter in self.parameters if name in formed]
        grads = [formed.pop(name) for name, _ in used]
        own = [clipped.of(name) for name, _ in used]
        dtypes = [parameter.dtype for _, parameter in used]
        if [g.dtype for g in grads] == dtypes and scale_in_place(grads, own, clipped.masked):
            sums = [grad[0] for grad in grads]
        else:
            sums = weighted_sum_each(grads, own, clipped.masked, dtypes)
        for (_, parameter), total in zip(used, sums, strict=True):
            add_to_grad(parameter, total)

    def abandon(self) -> None:
        """A sum pass failed: drop what it has left behind, and what it was added to."""
        self.ledger = None
        self.summed.begin()
        for layer in self.recorder.layers:
            for name in layer.spec.params:
                parameter = layer.parameter(name)  # under FSDP2 an unsharded one
                if parameter is not None:
                    parameter.grad = None
        for _, parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def _in(self, phase: Phase, losses: Tensor, *, bare: bool = False) -> Iterator[None]:
        self.phase = phase
        try:
            with self.recorder.backward(len(losses), bare=bare):
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
    if not ledger.kept.whole:
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


def _refuse_leaks(strategy: Ghost, before: dict[str, tuple[int, int]]) -> None:
    leaked = [n for n, p in strategy.parameters if before.get(n) != _state_of_grad(p)]
    if not leaked:
        return
    for name, parameter in strategy.parameters:
        if name in leaked:
            parameter.grad = None
    if (
        strategy.ledger is not None
        and strategy.ledger.kept.whole
        and strategy.recorder.lone is not None
    ):
        # By reentrant checkpoints, say, of which there were none before: not the next time.
        strategy.recorder.lone.rule_out("gradients came past the forward pass")
    raise foreign_gradients(leaked)


def run_backward(losses: Tensor, retain_graph: bool) -> None:
    """The backward pass of per-sample losses.

    Raises:
        RuntimeError: A compiled graph can run backward only once.
    """
    try:
        losses.sum().backward(retain_graph=retain_graph)
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        raise RuntimeError(
            "parts of the model are compiled for one backward pass only, and this mode takes "
            "two: use the mode with _bk at its end, which takes one, or set "
            "torch._functorch.config.donated_buffer = False before the first step"
        ) from error


def default_budget(device: torch.device) -> int | None:
    """Memory for records that wait: a twentieth of what a CUDA device holds now.

    At the start of a backward pass that is about its peak. Elsewhere there is no limit.
    """
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats["allocated_bytes"]["all"]["current"]) // 20 if stats else None


def _state_of_grad(parameter: nn.Parameter) -> tuple[int, int]:
    """Changes when a gradient is assigned or modified in place."""
    grad = parameter.grad
    return (0, 0) if grad is None else (id(grad), grad._version)
