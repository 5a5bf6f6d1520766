"""What a private optimizer checks before a step: its ranks, and the batch that was drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from opacus.core.isolation.check import Isolation
from opacus.core.platform.callers import callers
from opacus.core.platform.sharded import local_of
from opacus.core.platform.switches import switched_on
from opacus.core.privacy.draws import PART_LEFT, Draws
from opacus.core.privacy.second_use import SecondUse
from opacus.core.privacy.unit_names import UnitNames
from opacus.core.ranks.meeting import ranks_holding
from opacus.core.ranks.parallelism import Single
from opacus.core.ranks.reduction import OTHER_NUMBERS
from opacus.core.ranks.votes import Votes

logger = logging.getLogger(__name__)

STATE_DICT = "torch.distributed.checkpoint.state_dict"

INDEPENDENT = "OPACUS_INDEPENDENT_RANKS"

_STEP = " in step "


def only_makes_state(optimizer: Any) -> bool:
    """Whether ``step()`` was called by ``torch.distributed.checkpoint`` on zero gradients.

    ``get_state_dict`` and ``set_state_dict`` take a step of a new optimizer with gradients of
    zeros and a learning rate of zero, so that it has a state. Nothing is released by that.
    """
    if STATE_DICT not in [frame.f_globals.get("__name__") for frame in callers()]:
        return False
    if optimizer.state:
        return False
    groups = optimizer.param_groups
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return not any(bool((g != 0).any()) for g in map(local_of, grads))


class CheckedOptimizer:
    """Compares the batches of steps with the accountant's assumptions."""

    _parallelism: Single
    skip_counted_steps: Callable[[], None]
    # Of the Poisson sampler whose rate the accountant counts; None if there is none.
    _draws: Draws | None = None
    _second_use: SecondUse | None = None
    # What draws them: a resumed run must not draw the same again.
    sampler: Any = None
    # Of units, where the user names them.
    _unit_names: UnitNames | None = None
    _world_is_known = False
    # Of ranks that share a model.
    votes: Votes | None = None
    isolation: Isolation | None
    # Whether the gradients come from the criterion that make_private returned.
    expects_criterion = False

    def follow(self, draws: Draws | None, unit_names: UnitNames | None) -> None:
        """Look at the batches of steps.

        Args:
            draws: Of the Poisson sampler as whose batches steps are counted.
            unit_names: Of the units in each batch.
        """
        self._draws, self._unit_names = draws, unit_names
        self._second_use = None if draws is None else SecondUse(draws)
        if self._second_use is not None and self.isolation is not None:
            self.isolation.recorder.passes.given.append(self._second_use.look_at_inputs)
        self._warned_of_no_draw = False
        if self._parallelism.shares_key and dist.is_initialized() and dist.get_world_size() > 1:
            self.votes = Votes(ranks_holding(self.params))

    # Stands for the pass over a loader of physical batches that is under way.
    physical_pass: object | None = None
    # Whether a part of the logical batch was left out or refused.
    _part_is_lost = False
    _step_skip_queue: list[bool]
    _is_last_step_skipped: bool
    take_batch: Callable[[], None]
    reset_accumulation: Callable[[], None]
    zero_grad: Callable[..., None]

    def _samples(self) -> int:
        raise NotImplementedError

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        raise NotImplementedError

    def compare_with_draws(self) -> None:
        """Refuse a batch that is not one that was drawn.

        Raises:
            RuntimeError: See :class:`~opacus.core.privacy.draws.Draws` and
                :class:`~opacus.core.privacy.unit_names.UnitNames`.
        """
        if self._draws is not None or self._unit_names is not None:
            self._look_at_batch(final=not self._check_skip_next_step(pop_next=False))

    def take_checked(self) -> None:
        """Check the batch, then put it to those of the step: on all ranks, or on none.

        Raises:
            RuntimeError: Another rank refuses its batch, or its backward pass has failed. After
                any error nothing of the step is left, on all ranks.
        """
        if self.physical_pass is not None and not self._step_skip_queue:
            raise RuntimeError(
                "step() was called without a batch that the loader of BatchMemoryManager has given "
                "for it: each of those is one step, also after an error. Nothing was changed; take "
                "steps of other batches before that loader's pass, or after it"
            )
        if not self.expects_criterion:  # whose backward pass is where a batch begins
            self.begin_batch()
        try:
            with self.refusing():
                self._tell_of_failures()
                if self._part_is_lost and not self._check_skip_next_step(pop_next=False):
                    raise RuntimeError(PART_LEFT)
                self.check_isolation()
                self.compare_with_draws()
                self.take_batch()
            self._agree_on_step()
        except BaseException:
            self._drop_batch()
            raise

    def check_isolation(self) -> None:
        """Let the isolation check look at the batch, if that is due."""
        isolation = self.isolation
        if isolation is not None and isolation.pending:
            isolation.check()
        elif isolation is not None:
            isolation.schedule.steps += 1

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """An error within it drops the batch, and other ranks hear of it."""
        try:
            yield
        except BaseException as error:
            if self.votes is not None:
                self.votes.refuse(error)
            raise

    def begin_batch(self) -> None:
        """The backward pass of another batch begins."""
        if self.votes is not None:
            self.votes.begin()

    def _tell_of_failures(self) -> None:
        """Other ranks wait for a batch whose backward pass has failed and was dropped."""
        if self.isolation is None or self.expects_criterion:
            return
        unfinished = self.isolation.recorder.unfinished
        if unfinished.running and unfinished.failed:
            raise RuntimeError(
                "the backward pass of this batch has failed, and has left a part of its gradients: "
                "nothing of it was released. Run the step again, or go on with the next batch"
            )
        why = unfinished.take() if unfinished.dropped else ""
        if why and self.votes is not None:
            self.votes.refuse(why)
            self.votes.begin()

    def _drop_batch(self) -> None:
        """Nothing of the step is left, as after ``zero_grad()``; signals of later batches are."""
        if self.isolation is not None:
            self.isolation.recorder.unfinished.forget()
        self._lose_part()
        self.zero_grad(set_to_none=True)

    def leave_part(self) -> None:
        """A physical batch was left without its step: nothing of its logical batch is released.

        On all ranks, which else would wait for its vote and take that on the next one for it.
        """
        self._lose_part()
        if self.votes is not None:
            self.votes.refuse("the training loop has left out a physical batch")
            if self.isolation is not None:
                self.isolation.recorder.unfinished.tell()

    def _lose_part(self) -> None:
        """Drop the sums of a logical batch, and what is still to come of it."""
        more, signals = self._check_skip_next_step(pop_next=False), self._step_skip_queue[1:]
        if self._step_skip_queue and self._draws is not None:  # one signal for each batch
            self._draws.keep_latest(len(signals))
        self.reset_accumulation()
        self._step_skip_queue[:] = signals
        self._part_is_lost = more

    def _forget_signals(self) -> None:
        """Those of batches that a loader has given stay: the loop may have fetched ahead."""
        if self.physical_pass is None:
            self._step_skip_queue.clear()
            self._part_is_lost = False
        elif self._is_last_step_skipped:  # the rest of the logical batch is not all of it
            self._part_is_lost = True

    def agree(self) -> None:
        """Before ranks communicate in a backward pass: all come to that, or all raise.

        Raises:
            RuntimeError: Another rank refuses its batch.
        """
        if self.votes is not None:
            self.votes.agree("")

    def _look_at_batch(self, final: bool) -> None:
        if self._unit_names is not None:
            self._unit_names.check(final)
        if self._draws is None:
            return
        if self._parallelism.correlation is not None and not self._draws.started:
            raise RuntimeError(
                "correlated noise is for the batches of the data loader that make_private "
                "returned, in which each sample takes part once a pass: iterate over that loader"
            )
        if not self._draws.started and not self._warned_of_no_draw:
            self._warned_of_no_draw = True
            logger.warning(
                "A step is taken, but the data loader that make_private returned has not been "
                "iterated. Privacy is counted for its Poisson sampling: batches from elsewhere "
                "must be drawn in the same way, at the same rate."
            )
        if final and self._second_use is not None:
            self._second_use.check()
        self._draws.check(self._samples(), final=final)

    def _forget_batch(self) -> None:
        """What the step has seen is dropped."""
        for seen in (self._draws, self._unit_names):
            if seen is not None:
                seen.forget()

    def _agree_on_step(self) -> None:
        """Let no rank release what another one refuses, or still adds to, and then wait for it."""
        correlation = self._parallelism.correlation
        if self.votes is None and correlation is None:
            return
        final = not self._check_skip_next_step(pop_next=False)
        if self.votes is not None:
            self.skip_counted_steps()
            said = self.votes.agree(f"{final}{_STEP}{self._parallelism.key.step}")
            numbers = {rank: text.partition(_STEP)[2] for rank, text in said.items()}
            if len(set(numbers.values())) > 1:
                raise RuntimeError(
                    "nothing of this step was released: each rank would draw the noise of another "
                    f"step ({numbers} by rank). Load the same checkpoint, and the accountant's "
                    "state, on all"
                )
            if len(set(said.values())) > 1:
                raise RuntimeError(f"nothing of this step was released: {OTHER_NUMBERS}")
        if final and correlation is not None and self._draws is not None:
            correlation.take_part(self._draws.part, self._parallelism.key.step)

    def check_world(self) -> None:
        """Refuse a model of one process where there are several.

        Raises:
            RuntimeError: In the first step: each rank would train a model of its own.
        """
        if self._world_is_known:
            return
        self._world_is_known = True
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not several or type(self._parallelism) is not Single or switched_on(INDEPENDENT):
            return
        self._world_is_known = False
        raise RuntimeError(
            f"this optimizer was made private for one process, but there are "
            f"{dist.get_world_size()} ranks, whose models would drift apart while samples count "
            "once: wrap the model first (DistributedDataParallel, or FSDP2 with a ghost_fsdp "
            "mode), build the optimizer, then call make_private, and put no wrapper around the "
            "private model (accelerate.prepare(model) does). If ranks do train models of "
            f"their own, set {INDEPENDENT}=1"
        )
