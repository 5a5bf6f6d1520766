"""The interface that all accountants share: they record steps, and say what those steps cost."""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from opacus.accountants.history import (
    Entry,
    check_entry,
    check_noise_multiplier,
    check_sample_rate,
)
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
    """

    def __init__(self) -> None:
        self.history: list[Entry] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one optimizer step.

        Args:
            noise_multiplier: standard deviation of the noise divided by the sensitivity of the
                sum that it was added to; at least 0, where 0 means no privacy at all.
            sample_rate: probability of one sample being in the logical batch, in [0, 1].

        Raises:
            TypeError, ValueError: if a value is not a number in its range.
        """
        key = (check_noise_multiplier(noise_multiplier), check_sample_rate(sample_rate))
        if self.history and tuple(self.history[-1][:2]) == key:
            self.history[-1] = (*key, self.history[-1][2] + 1)
        else:
            self.history.append((*key, 1))

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
        return sum(steps for _, _, steps in self.history)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns a hook that records a step each time a DP optimizer takes one.

        For `optimizer.attach_step_hook`. Not needed after `make_private`, which counts already:
        attached there, it does not count a step a second time.

        Args:
            sample_rate: probability of one sample being in one batch of the data loader.

        Returns:
            A function of the optimizer. It reads `noise_multiplier` and `accumulated_iterations`
            at the time of the step: a step that sums over k batches has k times the sample rate.
        """
        return StepCounter(lambda: self, sample_rate)

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
        self.history = [check_entry(entry) for entry in state_dict["history"]]
