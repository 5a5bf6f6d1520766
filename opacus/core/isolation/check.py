"""Checks, while training, that a unit's gradient does not depend on the others of its batch.

Clipping bounds what a unit contributes only if its gradient is its own, and if the rows that
layers see are assigned to the right units. Neither can be read off a model. So now and then a
few units of a batch are run again, together and each alone, and their squared norms are
compared, parameter by parameter, before anything is released.

Note [What is run]
    The forward pass is run on a few rows of the arguments that the model was called with,
    when the optimizer is about to step: the graph of the batch is gone by then, so the check
    needs no more memory than the step. Backward starts from the *gradients that the loss
    sent to the model's outputs* in the real step, cut to the same rows. They are the very
    numbers of the step, at the size that it has; outputs that the loss does not use have none,
    and a cotangent of another size could hide a coupling or show one that does not matter. A
    scalar output (the loss of a model that computes it) has one gradient for the batch, which
    is shared out: a mean over samples is fine, a mean over the tokens of the batch is not.

Note [Units of tokens]
    Where rows hold several units (packed documents), whole rows are run together, as they are in
    the batch, and alone each of a few units, without the tokens of the row's others; see
    :mod:`opacus.core.isolation.token_runs`.

Note [What is switched off]
    Dropout does nothing in these runs, so that a row is the same with and without the
    others. A model that draws random numbers in another way draws others for a row alone. There a
    row among others is compared with the row among copies of itself, as many, with the same
    numbers: if these differ the model is refused. If not it gets a warning, since what depends on
    the number of rows was not seen.

Note [When]
    At the first step; at the first batch of a new structure (see
    :func:`~opacus.core.isolation.unit_slices.structure`); at the first one whose rows could not be
    followed, nor are known from others; and after a forward pass that took another course (see
    :mod:`opacus.core.record.course`), as often as a share of all steps allows; after a batch that
    was refused, and each time that its course is taken again; and every
    :attr:`Isolation.interval` steps. Under FSDP2 ranks decide alike: by the number of steps, and
    for a new structure by meeting in the store, where only ranks go that see one.

Note [What is not seen]
    A loss that the model and our criterion do not compute (``hooks``): only its gradient is
    known. Means that torch's own losses take over tokens or class weights are recognised in
    the graph, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opacus.core.isolation import messages
from opacus.core.isolation.errors import IncomparableError
from opacus.core.isolation.losses import Criterion, coupled_loss
from opacus.core.isolation.probe import Difference, Probe
from opacus.core.isolation.token_runs import TokenRuns, why_not
from opacus.core.isolation.unit_slices import UnitRows, number_of_units, structure
from opacus.core.isolation.watch import LossRuns, Watch, WatchedRuns
from opacus.core.platform.attributes import Attributes
from opacus.core.platform.switches import switched_on
from opacus.core.platform.torch_internals import outside_graphs, under_functorch
from opacus.core.platform.trees import tensors_of
from opacus.core.ranks.meeting import Meetings, ranks_with
from opacus.core.ranks.mesh import ModelRanks
from opacus.core.record.recorder import Recorder

VARIABLE = "OPACUS_ISOLATION_CHECK"
# Times that ranks together wait for others that took the same course as before, each at least once:
# another course was due to a rank's own data then.
MOST_ALONE = 8
# Seconds that a rank waits for others to see the same new structure, or the same other course.
_STRUCTURE_WAIT, _COURSE_WAIT = 5.0, 0.5


class IsolationError(RuntimeError):
    """A unit's gradient depends on other units of its batch. Nothing of the batch is released."""


@dataclass
class Schedule:
    """When a check is due; see Note [When]."""

    interval: int = 1000
    steps: int = 0
    checks: int = 0
    free: int = 0  # of these, checks whose time does not count
    latest: int = 0  # the step of the latest check
    known: set[Hashable] = field(default_factory=set)

    def due(self, key: Hashable) -> bool:
        """Whether a batch of this structure is checked in this step."""
        return self.periodic() or self.new(key)

    def periodic(self) -> bool:
        return self.checks == 0 or self.steps - self.latest >= self.interval

    def new(self, key: Hashable) -> bool:
        """Whether the structure is new, and checks have not taken too much time so far."""
        return key not in self.known and self.checks - self.free < 16 + self.steps // 500

    def doubt(self) -> None:
        """A batch was refused: the next ones are checked, too, until one is not.

        However many are refused, as many checks are left for others.
        """
        self.latest = -self.interval
        self.free += 1

    def note(self, key: Hashable) -> None:
        self.known.add(key)
        self.checks += 1
        self.latest = self.steps


class Isolation:
    """Watches forward passes of a private model and checks some before a step.

    Args:
        model: The model.
        recorder: Its recorder.
        batch_first: Whether dimension 0 of tensors counts units.
        shared: Whether the loss is a mean over units, or one loss a unit.
        mean: Whether the user's loss of a batch is a mean over units, rather than their sum.
        sees_loss: Whether losses come from our criterion (else the graph is looked at).
        replicated: Whether other processes hold the same parameters.
        ranks: Those that share a model sharded by FSDP2.

    Attributes:
        pending: Forward passes that will be checked before the step.
    """

    optimizer: Any = None  # the private one, alive as long as its model: it keeps others from steps
    _warned: ClassVar[bool] = False  # that the check is off

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        *,
        batch_first: bool = True,
        shared: bool = True,
        mean: bool = True,
        sees_loss: bool = False,
        replicated: bool = False,
        ranks: ModelRanks | None = None,
    ) -> None:
        self.model = model
        self.batch_first = batch_first
        self.shared = shared
        self.mean = mean
        self.sees_loss = sees_loss
        self.ranks = ranks
        self.schedule = Schedule()
        self.on = switched_on(VARIABLE, default=True)
        self._said: set[str] = set()
        self._meetings: Meetings | None = None
        if ranks is not None and ranks.count > 1:
            self._meetings = Meetings(ranks_with(model), "isolation")
        self._plain = ranks is None and not replicated
        self.attach(recorder)
        if not self.on and not Isolation._warned:
            Isolation._warned = True
            warnings.warn(messages.OFF.format(VARIABLE), stacklevel=6)

    def attach(self, recorder: Recorder) -> None:
        """Watch the model through this recorder, from its next batch on."""
        self.recorder = recorder
        self.schedule.checks = 0
        self._watch: Watch | None = None
        self._call: tuple[Any, int, Hashable] | None = None  # that runs: inputs, units, structure
        self._alone = 0  # times that only this rank's pass took another course
        self.pending: list[Watch] = []
        self._probe = Probe(self.model, recorder, plain=self._plain, any_rank=self._any_rank)
        recorder.handles += [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        ]

    @property
    def interval(self) -> int:
        """Steps between checks of batches whose structure is known; default 1,000."""
        return self.schedule.interval

    @interval.setter
    def interval(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"interval must be a number of steps >= 1, got {value}")
        self.schedule.interval = value

    # --- in the forward pass ---

    @outside_graphs
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or under_functorch():
            return
        self._watch, self._call = None, None
        recorder = self.recorder
        tapped = recorder.active(module) or recorder.lone_runs
        if not self.on or recorder.probed or recorder.in_backward or not tapped:
            return
        inputs = (args, kwargs)
        units = number_of_units(inputs, recorder.passes.latest_batch, self.batch_first)
        if units is None:
            self._warn(messages.UNSEEN.format("was called with no tensor"))
        if units is None or (units == 0 and self.ranks is None):
            return
        form = structure(inputs, units, sizes=self.ranks is None, training=module.training)
        key = form, recorder.whose.flags.state, recorder.whose.guesses
        self._call = inputs, units, key
        if any(w.key == key and self._counts(w) for w in self.pending):
            return  # one forward pass of each structure
        if not self._due(key):
            return
        self.pending = [w for w in self.pending if w.key != key]
        self._watch = self._watched(inputs, units, key)
        self._watch.started = Attributes(module, tensors=True)

    def _counts(self, watch: Watch) -> bool:
        """Whether a backward pass has gone through a forward pass; with other ranks has begun to.

        Those of which it failed, or that none has come to, are not of the step. Ranks must agree,
        and one without samples has no gradient.
        """
        return watch.complete if self.ranks is None else watch.begun

    def begin_backward(self) -> None:
        """A backward pass of the criterion's loss begins, on all ranks."""
        for watch in self.pending:
            watch.begun = True

    def drop(self) -> None:
        """No step will be of the batches that a backward pass has come to."""
        self.pending = [w for w in self.pending if not (w.begun or w.received)]

    def _watched(self, inputs: Any, units: int, key: Hashable) -> Watch:
        rows = UnitRows(units, self.batch_first)
        notice = None if self.sees_loss else self._notice_mean
        named = self.recorder.passes.named
        tokens = named.ids if named is not None and named.by_token else None
        return Watch(inputs, rows, key, self.shared, notice, tokens)

    @outside_graphs
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or self._call is None or self.recorder.probed:
            return None
        call, self._call = self._call, None
        watch, self._watch = self._watch, None
        course = self.recorder.whose.course.new
        ranks = 1 if self.ranks is None else self.ranks.count
        if watch is None and course and self._alone < max(1, MOST_ALONE // ranks):
            self.schedule.free += self.recorder.whose.course.compiled
            key = call[2], "another course", self.schedule.steps
            watch = self._watched(*call[:2], key) if self._due(key, _COURSE_WAIT) else None
            self._alone += watch is None and self._meetings is not None
        if watch is None:
            return None
        whose = self.recorder.whose
        watch.relies = course and not whose.followed
        watch.assumed, watch.course = whose.assumed, whose.course.taken
        self.pending.append(watch)
        if not tensors_of(output):
            self._warn(messages.UNSEEN.format(f"returned {type(output).__name__}, with no tensor"))
        return watch.gate(output)

    def _due(self, key: Hashable, wait: float = _STRUCTURE_WAIT) -> bool:
        schedule = self.schedule
        if self._meetings is None or schedule.periodic():
            return schedule.due(key)
        if not schedule.new(key):
            return False
        schedule.known.add(key)  # ranks that do not see it are not asked again
        label = f"{schedule.steps}/{len(self.pending)}/{self._call is None}"
        outcome = self._meetings.meet(label, repr(key), wait)
        return outcome.agreed

    # --- the criterion ---

    def look_at_losses(
        self,
        criterion: Criterion,
        args: Any,
        kwargs: Any,
        losses: Tensor,
        rows: int | None,
        ids: Tensor | None = None,
        keeper: object = None,
    ) -> None:
        """Compare losses ``[B]`` of our criterion with those of samples alone, if it is due.

        What is found is an error in the next step. See
        :func:`~opacus.core.isolation.losses.coupled_loss` for the arguments.
        """
        waiting = [w for w in self.pending if not w.complete] or self.pending
        if not waiting or waiting[-1].refusal:
            return
        with torch.no_grad(), self.recorder.paused():
            found = coupled_loss(criterion, args, kwargs, losses, rows, ids, keeper)
        if found is not None:
            for watch in waiting:
                watch.refusal = messages.COUPLED.format(found)

    def _notice_mean(self, found: str) -> None:
        self._warn(messages.MEAN.format(found))

    # --- before a step ---

    def check(self) -> None:
        """Check the forward passes that are due; for the optimizer, before it releases.

        Raises:
            IsolationError: A unit is not the same alone.
        """
        pending, self.pending = [w for w in self.pending if self._counts(w)], []
        if not pending:
            self.schedule.steps += 1
            return
        self._watch, self._call = None, None
        refusal = next((watch.refusal for watch in pending if watch.refusal), None)
        try:
            for watch in pending:
                refusal = self._checked(watch, refusal)
            if refusal is not None:
                self.schedule.doubt()
                for watch in pending if refusal != messages.ELSEWHERE else ():
                    self.recorder.whose.course.forget(watch.course)
                raise IsolationError(refusal)
        finally:
            self.schedule.steps += 1

    def check_loss(
        self,
        model: Any,
        batch: Any,
        loss: Callable[[Any, Any], Any],
        either: bool = False,
    ) -> None:
        """See :func:`opacus.check_isolation`.

        Args:
            model: What the loss is called with.
            batch: The same.
            loss: Gives the loss of a batch.
            either: Whether that may be a mean or a sum over units, as nobody has said which.
        """
        units = number_of_units(batch, None, self.batch_first)
        rows = UnitRows(units or 0, self.batch_first)
        if not units or units < 2 or not rows.divides(batch):
            raise ValueError(
                "batch must hold at least two samples, in the first dimension of tensors (with "
                "batch_first=False in the second), to compare them"
            )
        if not self.model.training:
            raise ValueError("model is in eval mode, in which nothing is recorded: call train()")
        said = ""
        for mean in (self.mean, not self.mean) if either else (self.mean,):
            runs = LossRuns(model, batch, rows, loss, mean)
            try:
                found = self._probe.run(runs)
            except IncomparableError as reason:
                raise ValueError(f"loss(model, batch) cannot be checked: {reason}") from None
            if not self._any_rank(bool(found)):
                return
            if found:
                said = said or messages.explained(found[0], self.model, runs.count)
        raise IsolationError(said or messages.ELSEWHERE)

    def _checked(self, watch: Watch, refusal: str | None) -> str | None:
        """Check one forward pass; what is wrong with it, or has been before."""
        runs = self._runs(watch)
        if not self._any_rank(runs is not None and bool(watch.received)) or runs is None:
            return refusal
        found: list[Difference] = []
        try:
            found = self._probe.run(runs, watch.dtypes)
            if found and self.ranks is None and watch.rows.has_squares(watch.inputs):
                watch.rows = replace(watch.rows, squares=False)
                found = self._probe.run(self._real_runs(watch), watch.dtypes)
        except IncomparableError as reason:
            if reason.compared or watch.tokens is not None or not watch.assumed:
                self._warn(messages.INCOMPARABLE.format(reason))
            else:
                refusal = refusal or messages.NOT_SHOWN.format(reason)
        if found:
            refusal = refusal or messages.explained(
                found[0], self.model, runs.count, bool(watch.scalars), watch.tokens is not None
            )
        if self._any_rank(refusal is not None):
            return refusal or messages.ELSEWHERE
        self.schedule.note(watch.key)
        return None

    def _runs(self, watch: Watch) -> WatchedRuns | None:
        """How to run the model on units of this pass; ``None`` if there are none to run."""
        usable = watch.prepare()
        reason = why_not(watch) if usable and watch.tokens is not None else ""
        if reason:
            usable = False
            self._warn(messages.INCOMPARABLE.format(reason))
        if self.ranks is not None:
            made_up = 2 if watch.tokens is None else 1
            return self._real_runs(watch) if usable else WatchedRuns(self.model, watch, made_up)
        if not usable or not self.model.training:
            return None
        if not watch.divided or not watch.rows.divides(watch.inputs):
            self.schedule.note(watch.key)
            self._warn(messages.NO_ROWS)
            return None
        return self._real_runs(watch)

    def _real_runs(self, watch: Watch) -> WatchedRuns:
        return (WatchedRuns if watch.tokens is None else TokenRuns)(self.model, watch)

    def _any_rank(self, value: bool) -> bool:
        if self.ranks is None or (self.ranks.count == 1 and not self.ranks.tensor):
            return value
        every = self.ranks.gather_all(torch.tensor([int(value)], device=self.ranks.device))
        return bool(every.any())

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None, "_call": None, "optimizer": None, "pending": []}
