"""Observers of a private optimizer's steps: accountants, which count them, and users' hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opacus.accountants.step_counter import Count, StepCounter, counts
from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.parallelism import Single
from opacus.optimizers.wrapped import WrappedOptimizer

logger = logging.getLogger(__name__)


class Paid(NamedTuple):
    """What accountants have recorded of a step before it is taken.

    Attributes:
        batches: Number of batches in it.
        noise_multiplier: As it was recorded.
        counts: What was recorded.
        books: Where; a checkpoint that is loaded brings others, without the record.
    """

    batches: int
    noise_multiplier: float
    counts: list[Count]
    books: list[Any]

    def holds(self, noise_multiplier: float, books: list[Any]) -> bool:
        """Whether a step with this noise is still recorded in these books."""
        return _same(self.books, books) and self.noise_multiplier == noise_multiplier


def _books(counts: Sequence[Count | StepCounter]) -> list[Any]:
    """The history of each accountant, or itself if it keeps none that can be told apart."""
    accountants = [count.accountant for count in counts]
    return [getattr(own, "__dict__", {}).get("history", own) for own in accountants]


def _same(books: Sequence[Any], others: Sequence[Any]) -> bool:
    return [*map(id, books)] == [*map(id, others)]


def _length(counter: StepCounter) -> int:
    """Number of steps that its accountant has recorded, 0 if it does not say."""
    accountant = counter.accountant
    return len(accountant) if hasattr(accountant, "__len__") else 0


class CountedOptimizer(WrappedOptimizer):
    """Counts each real step once with each accountant, whatever hooks a user attaches."""

    _privacy: PrivacyParams
    accumulated_iterations: int
    _parallelism: Single
    _paid: Paid | None = None  # of the step, as something of it was released before it

    def _start_counting(self) -> None:
        self._number = 0  # of the step's noise, where that is correlated
        self._known_books: list[Any] = []  # those whose steps the noise's numbers are after
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

    def _counts(self, batches: int | None = None) -> list[Count]:
        """This step, once for each accountant that counts it.

        Args:
            batches: Number of batches in it; those that are accumulated if ``None``.

        Raises:
            ValueError: The batches in it cannot be one step.
        """
        batches = self.accumulated_iterations if batches is None else batches
        found = counts(self._counters, batches) if self._counters else []
        self.skip_counted_steps()
        correlation = self._parallelism.correlation
        if correlation is None:
            return found
        self._number = number = self._parallelism.key.step
        return [c._replace(sample_rate=correlation.rate(number, c.sample_rate)) for c in found]

    def skip_counted_steps(self) -> None:
        """Draw no noise again of steps that an accountant counts, as one does that was loaded.

        A seeded key is that of the run before, and its numbers come with the engine's checkpoints,
        not with a state of the accountant alone.
        """
        books = _books(self._counters)
        resumed, self._resumed = self._resumed, False
        if not resumed and _same(books, self._known_books):
            return
        self._known_books = books
        steps = self._counted()
        if resumed and books and not steps:
            logger.warning(
                "A state was loaded into the optimizer, but the accountant counts no step, so that "
                "epsilon is of the coming steps alone. Unless those before were on public data, "
                "load what they have spent, too: engine.accountant.load_state_dict(), or all by "
                "engine.save_checkpoint() and load_checkpoint().%s",
                " Noise and batches, which come from a seed, are drawn again as in the steps "
                "before: a difference of two such steps has no noise."
                if self._parallelism.key.seeded
                else "",
            )
        if self._parallelism.correlation is None:  # its numbers say what a sample takes part in
            self._parallelism.key.pass_over(steps)

    def steps_of_others(self) -> int:
        """Steps that an accountant counts which were loaded into it since the latest step here.

        The sampler asks when a pass begins: batches are drawn before their step.
        """
        return 0 if _same(_books(self._counters), self._known_books) else self._counted()

    def _counted(self) -> int:
        """Steps that an accountant has recorded; the most, if there are several."""
        return max(map(_length, self._counters), default=0)

    def know_books(self) -> None:
        """The noise's numbers are after the steps that accountants count now."""
        self._known_books = _books(self._counters)

    def pay_early(self, batches: int) -> None:
        """Something of the step's samples is about to be released: the step counts now.

        Args:
            batches: Number of batches that are in the step so far.
        """
        self._paid = self._record(self._counts(batches), batches)

    def check_early(self, batches: int) -> None:
        """Refuse a batch of which :meth:`pay_early` could not count the step.

        Args:
            batches: Number of batches that are in the step with it.

        Raises:
            ValueError: So many cannot be one step, or an accountant needs steps of one rate, which
                grows with each batch.
        """
        for count in self._counts(batches):
            if batches > 1 and getattr(count.accountant, "counts_one_rate", False):
                raise ValueError(
                    f"the accountant {count.accountant.mechanism()!r} needs steps of one sample "
                    "rate, but adaptive clipping counts each batch of a step when C moves by it: "
                    "call optimizer.step() after each batch (BatchMemoryManager splits those that "
                    "are too large), or use the accountant 'prv' or 'rdp'"
                )

    def give_up_step(self) -> None:
        """What was recorded early stays; the next step counts anew."""
        self._paid = None

    def _count_step(self, counts: list[Count]) -> None:
        self._record(counts, self.accumulated_iterations)
        self._paid = None

    def _record(self, counts: list[Count], batches: int) -> Paid:
        """Record the step, unless that was done; one of more batches replaces what was."""
        earlier, noise_multiplier = self._paid, self._privacy.noise_multiplier
        if earlier is not None and not earlier.holds(noise_multiplier, _books(counts)):
            earlier = None
        if earlier is not None and batches <= earlier.batches:
            return earlier
        for count in counts:
            count.record(noise_multiplier)
        correlation = self._parallelism.correlation
        if correlation is not None:  # what is recorded again has rate 0
            correlation.pay(self._number)
        elif earlier is not None:
            for count in earlier.counts:
                count.withdraw(noise_multiplier)
        return Paid(batches, noise_multiplier, counts, _books(counts))

    def call_step_hooks(self) -> None:
        """Call the users' hooks, in the order in which they were attached."""
        for hook in self._step_hooks:
            hook(self)
