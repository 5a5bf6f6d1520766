"""The interface that all accountants share: they record steps, and say what those steps cost."""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from opacus.accountants.history import (
    Entry,
    check_entry,
    check_noise_multiplier,
    check_sample_rate,
    make_entry,
    read_entry,
    refuse_sampling,
)
from opacus.accountants.sampling import Sampling
from opacus.accountants.step_counter import StepCounter


def reject_unknown_arguments(where: str, unknown: Mapping[str, Any]) -> None:
    """Raises TypeError if a ``**kwargs`` caught anything, instead of ignoring it."""
    if unknown:
        names = ", ".join(sorted(unknown))
        raise TypeError(f"{where} got unexpected keyword arguments: {names}")


class IAccountant(abc.ABC):
    """Records the noisy steps of a training run and bounds their total privacy cost.

    What happened (`history`) is kept apart from how it is counted (`get_epsilon`), so a saved
    history stays meaningful when the counting improves. A refused call leaves it untouched.

    Attributes:
        history: list of ``(noise_multiplier, sample_rate, steps)``; see
            `opacus.accountants.history`.
        counts_every_sampling: whether `get_epsilon` counts other sampling than plain Poisson.
        counts_one_rate: whether all steps must have the same sample rate.
    """

    counts_every_sampling: ClassVar[bool] = False
    counts_one_rate: ClassVar[bool] = False

    def __init__(self) -> None:
        self.history: list[Entry] = []

    def step(
        self, *, noise_multiplier: float, sample_rate: float, sampling: Sampling | None = None
    ) -> None:
        """Records one optimizer step.

        Args:
            noise_multiplier: standard deviation of the noise divided by the sensitivity of the
                sum that it was added to; at least 0, where 0 means no privacy at all.
            sample_rate: probability of one sample being in the logical batch, in [0, 1].
            sampling: how the batch was drawn; None for plain Poisson sampling.

        Raises:
            TypeError, ValueError: if a value is not a number in its range, `sampling` does not
                agree with `sample_rate`, or this accountant does not count it.
        """
        rate = check_sample_rate(sample_rate)
        if not self.counts_every_sampling:
            refuse_sampling(sampling)
        if sampling is not None:
            sampling.check_rate(rate)
        mechanism = (check_noise_multiplier(noise_multiplier), rate, sampling)
        last, steps = read_entry(self.history[-1]) if self.history else (None, 0)
        if last == mechanism:
            self.history[-1] = make_entry(mechanism, steps + 1)
        else:
            self.history.append(make_entry(mechanism, 1))

    def withdraw(
        self, *, noise_multiplier: float, sample_rate: float, sampling: Sampling | None = None
    ) -> None:
        """Takes back one step, which another that was recorded since includes.

        Args:
            noise_multiplier: as in `step`.
            sample_rate: as in `step`.
            sampling: as in `step`.
        """
        rate = check_sample_rate(sample_rate)
        mechanism = (check_noise_multiplier(noise_multiplier), rate, sampling)
        for place in reversed(range(len(self.history))):
            known, steps = read_entry(self.history[place])
            if known == mechanism:
                left = [make_entry(mechanism, steps - 1)] if steps > 1 else []
                self.history[place : place + 1] = left
                return

    @abc.abstractmethod
    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Returns an epsilon for which all recorded steps together are (epsilon, delta)-DP.

        Neighbouring datasets differ by adding or removing one sample. Every accountant returns 0
        when nothing was recorded, infinity after a step without noise, and never less than 0.

        Args:
            delta: strictly between 0 and 1.
            *args: what the accountant documents.
            **kwargs: what the accountant documents; anything else is a TypeError.
        """

    @classmethod
    @abc.abstractmethod
    def mechanism(cls) -> str:
        """Returns the name under which the accountant is registered, such as ``"rdp"``."""

    def __len__(self) -> int:
        """Returns the number of optimizer steps recorded."""
        return sum(entry[2] for entry in self.history)

    def get_optimizer_hook_fn(
        self, sample_rate: float, sampling: Sampling | None = None
    ) -> Callable[[Any], None]:
        """Returns a hook that records a step each time a DP optimizer takes one.

        For `optimizer.attach_step_hook`. Not needed after `make_private`, which counts already:
        attached there, it does not count a step a second time.

        Args:
            sample_rate: probability of one sample being in one batch of the data loader.
            sampling: how that batch is drawn; None for plain Poisson sampling.

        Returns:
            A function of the optimizer. It reads `noise_multiplier` and `accumulated_iterations`
            at the time of the step: a step that sums over k batches has k times the sample rate.
            Other sampling than plain Poisson is refused for k above 1.

        Raises:
            ValueError: if `sampling` does not agree with `sample_rate`, or is not counted here.
        """
        if sampling is not None:
            if not self.counts_every_sampling:
                refuse_sampling(sampling)
            sampling.check_rate(check_sample_rate(sample_rate))
        return StepCounter(lambda: self, sample_rate, sampling)

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the history and the mechanism's name, as plain types.

        Args:
            destination: a mapping to write into; a new one if None.
        """
        destination = OrderedDict() if destination is None else destination
        destination["history"] = [check_entry(entry) for entry in self.history]
        destination["mechanism"] = self.mechanism()
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces the history by a saved one.

        Args:
            state_dict: what `state_dict` returned; lists may stand for tuples, as in JSON.

        Raises:
            ValueError: if a key is missing, the state belongs to another mechanism, or an entry
                is not valid. The history is unchanged then.
        """
        if not state_dict:
            raise ValueError(f"state_dict must hold a history and a mechanism, got {state_dict!r}")
        for key in ("history", "mechanism"):
            if key not in state_dict:
                raise ValueError(f"state_dict has no key {key!r}; it has {sorted(state_dict)}")
        if state_dict["mechanism"] != self.mechanism():
            raise ValueError(
                f"state_dict of the accountant {state_dict['mechanism']!r} cannot be loaded into "
                f"one of {self.mechanism()!r}; create it with "
                f"create_accountant({state_dict['mechanism']!r})"
            )
        history = [check_entry(entry) for entry in state_dict["history"]]
        if not self.counts_every_sampling:
            for entry in history:
                refuse_sampling(read_entry(entry)[0][2])
        self.history = history
