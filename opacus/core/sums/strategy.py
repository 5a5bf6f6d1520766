"""Ghost strategies: the clipped sum without all per-sample gradients at once.

``TwoPass`` (ghost clipping, arXiv:2110.05679, arXiv:2009.03106) finds the norms in
a first backward and forms only the clipped sum in a second one. ``OnePass``
(``one_pass.py``) keeps what the sum needs, so that there is no second one.
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
from opacus.core.platform.profiling import FIRST_BACKWARD, SECOND_BACKWARD, each_layer, timed
from opacus.core.privacy.clipping import Factors
from opacus.core.privacy.gradients import foreign_gradients, refuse_hooks, was_processed
from opacus.core.record.record import ForwardPass, Record
from opacus.core.record.recorder import Recorder
from opacus.core.sums.limits import Limits
from opacus.core.sums.planner import Planner
from opacus.core.sums.seen import REPLAY_ADVICE, Seen, compared
from opacus.core.sums.terms import add_to_grad
from opacus.core.sums.unreduced import Unreduced
from opacus.core.sums.weighting import Weighting


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


class Ghost:
    """Norms in a backward pass that forms no parameter gradient, then a clipped sum.

    Parameter gradients come from the rules alone, never from autograd: what was not
    seen cannot enter the sum. A trainable parameter that gets a gradient past the taps
    is an error that names it.

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
        # Forward passes in the running norm pass, and those in the clipped sum already.
        self._passes: set[ForwardPass] = set()
        self._summed: set[ForwardPass] = set()
        self._ordinary: Callable[[Record], None] | None = None
        self._ordinary_whole: Callable[[ForwardPass, Mapping[str, Tensor]], None] | None = None

    def go_on_from(self, other: Ghost) -> None:
        """Take the place of another one, of the same model with fewer layers."""
        self.budget_bytes = other.budget_bytes
        self.limits.go_on_from(other.limits)
        if self.planner is not None and other.planner is not None:
            self.planner.rounding = other.planner.rounding
            self.planner.host_budget = other.planner.host_budget
        self._summed = other._summed

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
            self._passes.add(record.forward_pass)
        check_sizes(record)
        self.ledger.add(record)

    def _weigh(self, record: Record) -> None:
        """A layer's backward runs again for the sum."""
        raise NotImplementedError

    def receive_whole(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """Take the gradients of a batch of one sample; see :mod:`opacus.core.record.whole`."""
        if self.phase is Phase.NORMS:
            assert self.ledger is not None
            self._passes.add(forward_pass)
            self.ledger.kept.add_whole(grads)
        elif self.phase is Phase.IDLE and self._ordinary_whole is not None:
            self._ordinary_whole(forward_pass, grads)

    @timed(FIRST_BACKWARD)
    def norm_pass(self, losses: Tensor, retain_graph: bool = False) -> None:
        """Backward pass that fills :attr:`ledger` with the records of ``losses`` ``[B]``.

        Raises:
            RuntimeError: A trainable parameter received a gradient past the taps, or these
                samples are in the clipped sum already.
        """
        refuse_hooks(self.parameters)
        for _, parameter in self.parameters:
            if parameter.grad is not None and was_processed(parameter.grad):
                parameter.grad = None  # of an earlier step, zeroed or not: nothing is added to it
        self._passes.clear()
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
            _backward(losses, retain_graph)
        self._refuse_leaks(before)
        self._refuse_repeats()
        self._note_samples(losses.shape[0])

    def _note_samples(self, samples: int) -> None:
        """What the norm pass has shown of batches of one sample."""
        lone, ledger = self.recorder.lone, self.ledger
        if lone is None or ledger is None:
            return
        if not ledger.kept.whole:
            lone.learn(self._passes, samples)
            return
        rows = {name: n for one in self._passes for name, n in one.rows.items() if n > 1}
        reason = None
        if samples != 1:
            reason = f"the model was given one sample, but there are {samples} losses"
        elif ledger.tapped:
            reason = "layers were called outside the model's forward"
        elif rows:
            name, n = next(iter(rows.items()))
            reason = f"the model was given one sample, but layer '{name}' saw {n} rows"
        if reason is not None:
            lone.rule_out(reason)
            raise RuntimeError(
                f"{reason}, so per-sample gradients are unknown. Nothing was added to the model. "
                "From now on batches of one sample are treated like others: run the step again "
                "(OPACUS_LONE_SAMPLE=0 does so from the start)"
            )

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

    def start_sum(self) -> None:
        """The parameters' ``grad`` are not in use: no sample has been summed yet."""
        self._summed.clear()

    def finish_sum(self) -> None:
        """The clipped sum of the latest norm pass is in the parameters' ``grad``."""
        self._summed.update(self._passes)

    def abandon(self) -> None:
        """A sum pass failed: drop what it has left behind, and what it was added to."""
        self.ledger = None
        self.start_sum()
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

    def _refuse_leaks(self, before: dict[str, tuple[int, int]]) -> None:
        leaked = [n for n, p in self.parameters if before.get(n) != _state_of_grad(p)]
        if not leaked:
            return
        for name, parameter in self.parameters:
            if name in leaked:
                parameter.grad = None
        if self.ledger is not None and self.ledger.kept.whole and self.recorder.lone is not None:
            # By reentrant checkpoints, say, of which there were none before: not the next time.
            self.recorder.lone.rule_out("gradients came past the forward pass")
        raise foreign_gradients(leaked)

    def note_ordinary(self, forward_pass: ForwardPass, parameters: Sequence[str]) -> None:
        """A loss that is not the criterion's runs backward through a forward pass.

        Raises:
            RuntimeError: The clipped sum has samples of that pass already.
        """
        forward_pass.ordinary = parameters = tuple(parameters)
        if forward_pass in self._summed:
            self._refuse_second_loss(parameters)

    def _refuse_repeats(self) -> None:
        for forward_pass in self._passes:
            if forward_pass.ordinary:
                self._refuse_second_loss(forward_pass.ordinary)
        if self._passes & self._summed:
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
        fresh: dict[str, Any] = {"_passes": set(), "_summed": set()}
        return {**self.__dict__, **fresh, "ledger": None, "phase": Phase.IDLE}


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
        super().norm_pass(losses, retain_graph)

    @timed(SECOND_BACKWARD)
    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """The backward pass of ``losses`` again, weighted by layer; none of a lone sample."""
        if self.ledger is not None and self.ledger.kept.whole:
            self._sum_whole(clipped)
            return
        self._weighting = Weighting(clipped)
        try:
            with self._in(Phase.SUM, losses):
                _backward(losses, retain_graph)
            self.doubt = compared(self._seen, REPLAY_ADVICE)
        finally:
            self._weighting = self.ledger = None
            self._seen = Seen()

    @each_layer
    def _weigh(self, record: Record) -> None:
        for name, grad in self._weighted(record).items():
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
        fresh = {"_weighting": None, "doubt": None, "_seen": Seen()}
        return {**super().__getstate__(), **fresh}


def _backward(losses: Tensor, retain_graph: bool) -> None:
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
