"""Observers of a private optimizer's steps: accountants, which count them, and users' hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from opacus.accountants.step_counter import Count, StepCounter, counts
from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.parallelism import Single
from opacus.optimizers.wrapped import WrappedOptimizer

logger = logging.getLogger(__name__)


class CountedOptimizer(WrappedOptimizer):
    """Counts each real step once with each accountant, whatever hooks a user attaches."""

    _privacy: PrivacyParams
    accumulated_iterations: int
    _parallelism: Single
    _owed = False  # whether something of the step was released before the step

    def _start_counting(self) -> None:
        self._number = 0  # of the step's noise, where that is correlated
        self._counters: list[StepCounter] = []
        self._step_hooks: list[Callable[[Any], None]] = []

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Call ``fn(optimizer)`` in every real step, after the hooks attached before.

        An accountant's hook (``get_optimizer_hook_fn``) is not called: the step itself counts
        with that accountant, exactly once, also if :meth:`PrivacyEngine.make_private` has
        attached it before.

        Raises:
            ValueError: The accountant counts the steps already, as those of another sampling.
        """
        if not isinstance(fn, StepCounter):
            self._step_hooks.append(fn)
            return
        for known in self._counters:
            if known.accountant is fn.accountant and known.sampling != fn.sampling:
                raise ValueError(
                    f"this accountant counts the optimizer's steps already, as those of "
                    f"{known.sampling or 'plain Poisson sampling'}, and cannot count them as "
                    f"{fn.sampling or 'plain Poisson sampling'}, too: give make_private the "
                    "argument sampling="
                )
            if known.accountant is fn.accountant and known.sample_rate != fn.sample_rate:
                logger.warning(
                    "This accountant counts the optimizer's steps already, at sample rate %g; a "
                    "hook of rate %g was attached. Each step counts once, at the larger rate.",
                    known.sample_rate,
                    fn.sample_rate,
                )
        self._counters.append(fn)

    def counts_for(self, accountant: Any) -> bool:
        """Whether the steps of this optimizer are counted with ``accountant``."""
        return any(counter.accountant is accountant for counter in self._counters)

    @property
    def step_hook(self) -> Callable[[Any], None] | None:
        """What counts the steps, or else the hook attached last; setting it attaches another."""
        if self._counters:
            return self._counters[0]
        return self._step_hooks[-1] if self._step_hooks else None

    @step_hook.setter
    def step_hook(self, fn: Callable[[Any], None]) -> None:
        self.attach_step_hook(fn)

    def _counts(self) -> list[Count]:
        """This step, once for each accountant that counts it.

        Raises:
            ValueError: The batches in it cannot be one step.
        """
        found = counts(self._counters, self.accumulated_iterations) if self._counters else []
        correlation = self._parallelism.correlation
        if correlation is None:
            return found
        self._number = number = self._parallelism.key.step
        return [c._replace(sample_rate=correlation.rate(number, c.sample_rate)) for c in found]

    def owe_step(self) -> None:
        """Something of the step's samples is released now: it counts, also without a step."""
        self._owed = True

    def pay_owed_step(self) -> None:
        """The step is given up: it is counted if something of it was released."""
        if self._owed:
            self._count_step(self._counts())

    def _count_step(self, counts: list[Count]) -> None:
        self._owed = False
        for count in counts:
            count.record(self._privacy.noise_multiplier)
        if self._parallelism.correlation is not None:
            self._parallelism.correlation.pay(self._number)

    def call_step_hooks(self) -> None:
        """Call the users' hooks, in the order in which they were attached."""
        for hook in self._step_hooks:
            hook(self)
