"""What noise and clipping schedulers share: they multiply one number of a DP optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


class ValueScheduler:
    """Sets one attribute of an optimizer anew each time `step` is called.

    Attributes:
        optimizer: the DP optimizer.
        last_epoch: number of the last `step`; 0 once the scheduler exists.
    """

    _attribute: str  # the optimizer's attribute, set by a subclass
    _function_name: str | None = None  # an attribute that is a function, left out of the state

    def __init__(self, optimizer: Any, *, last_epoch: int = -1) -> None:
        if not hasattr(optimizer, self._attribute):
            raise ValueError(
                f"{type(self).__name__} needs an optimizer with {self._attribute}, got "
                f"{type(optimizer).__name__}; pass the one that make_private returned"
            )
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.step()

    def _next_value(self) -> float:
        raise NotImplementedError

    def _current(self) -> float:
        return getattr(self.optimizer, self._attribute)  # type: ignore[no-any-return]

    def step(self) -> None:
        """Moves on by one epoch (or whatever the caller counts) and sets the optimizer's value.

        Raises:
            ValueError: if the new value is not a finite number above 0 (0 is allowed for noise).
        """
        self.last_epoch += 1
        try:
            self._set(self._next_value())
        except Exception:
            self.last_epoch -= 1
            raise

    def _set(self, value: float) -> None:
        lowest_allowed = value > 0.0 or (value == 0.0 and self._attribute == "noise_multiplier")
        if not (lowest_allowed and value < math.inf):
            raise ValueError(
                f"{type(self).__name__} gave {self._attribute} = {value!r} at epoch "
                f"{self.last_epoch}; it must be a finite number above 0"
            )
        setattr(self.optimizer, self._attribute, value)

    def _factor(self, epoch: int) -> float | None:
        """Returns the schedule's total factor at `epoch`, None if it is not known."""
        return None

    def _resumed_value(self, factor: float | None, state: Mapping[str, Any]) -> float:
        """Returns the optimizer's value at the loaded epoch; `factor` is that of the epoch before.

        A schedule is relative to the value that `make_private` was given. A saved value counts
        only where the factor is not known, as in users' schedules.
        """
        target = self._factor(self.last_epoch)
        if target is None or factor is None:
            return state.get(self._attribute, self._current())  # type: ignore[no-any-return]
        return self._current() * (target / factor if factor else target)

    def _state_names(self) -> set[str]:
        return set(vars(self)) - {"optimizer", self._function_name}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain types; the optimizer and a user's function are not part of it.

        The optimizer's current value is, if the schedule cannot tell it from the epoch.
        """
        state = {name: getattr(self, name) for name in sorted(self._state_names())}
        if self._factor(self.last_epoch) is None:
            state[self._attribute] = self._current()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state and moves the optimizer's value on to where the schedule was.

        The value starts from what the optimizer has: a run made private with another noise
        multiplier keeps its own, multiplied by what the schedule had reached.

        Args:
            state_dict: what `state_dict` returned. States of Opacus 1.6.0 load too; a function in
                them is ignored in favour of this one's.

        Raises:
            ValueError: if a key is missing or unknown, or the value would not be allowed; nothing
                is changed then.
        """
        required = self._state_names()
        optional = {self._attribute, self._function_name}
        missing, unknown = required - set(state_dict), set(state_dict) - required - optional
        if missing or unknown:
            raise ValueError(
                f"this is not a state of {type(self).__name__}: keys missing {sorted(missing)}, "
                f"unknown {sorted(unknown)}"
            )
        own = {name: getattr(self, name) for name in required}
        factor = self._factor(self.last_epoch)
        vars(self).update({name: state_dict[name] for name in required})
        try:
            self._set(self._resumed_value(factor, state_dict))
        except Exception:
            vars(self).update(own)
            raise


def check_gamma(gamma: float) -> float:
    """Returns `gamma`, or raises unless it is a finite number above 0."""
    if not 0.0 < gamma < math.inf:
        raise ValueError(f"gamma must be a finite number above 0, got {gamma!r}")
    return gamma


def check_step_size(step_size: int) -> int:
    """Returns `step_size`, or raises unless it is at least 1."""
    if step_size < 1:
        raise ValueError(f"step_size must be at least 1, got {step_size!r}")
    return step_size


def check_function(name: str, function: Callable[[int], float]) -> Callable[[int], float]:
    """Returns `function`, or raises unless it can be called."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of the epoch, got {function!r}")
    return function


def power(gamma: float, exponent: int) -> float:
    """Returns `gamma` multiplied `exponent` times, infinity if that is too large for a float."""
    try:
        return gamma ** max(exponent, 0)
    except OverflowError:
        return math.inf


class Exponential(ValueScheduler):
    """Multiplies the value by `gamma` every epoch."""

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = check_gamma(gamma)
        super().__init__(optimizer, last_epoch=last_epoch)

    def _scheduled(self) -> float:
        return self._current() * (self.gamma if self.last_epoch > 0 else 1.0)

    def _factor(self, epoch: int) -> float:
        return power(self.gamma, epoch)


class Stepwise(ValueScheduler):
    """Multiplies the value by `gamma` every `step_size` epochs."""

    def __init__(
        self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        self.step_size = check_step_size(step_size)
        self.gamma = check_gamma(gamma)
        super().__init__(optimizer, last_epoch=last_epoch)

    def _scheduled(self) -> float:
        due = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return self._current() * (self.gamma if due else 1.0)

    def _factor(self, epoch: int) -> float:
        return power(self.gamma, epoch // self.step_size)
