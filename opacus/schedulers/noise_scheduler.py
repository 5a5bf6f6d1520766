"""Schedulers of the noise multiplier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opacus.schedulers._value_scheduler import (
    Exponential,
    Stepwise,
    ValueScheduler,
    check_function,
)


class _NoiseScheduler(ValueScheduler):
    """Base of the schedulers that set ``optimizer.noise_multiplier``.

    The accountant records the noise multiplier of every step, so a schedule is accounted exactly
    by the accountants "pld", "prv" and "rdp" ("gdp" refuses noise that changes).
    """

    _attribute = "noise_multiplier"

    def get_noise_multiplier(self) -> float:
        """Returns the noise multiplier to set at epoch `last_epoch`."""
        raise NotImplementedError

    def _next_value(self) -> float:
        return self.get_noise_multiplier()


class ExponentialNoise(Exponential, _NoiseScheduler):
    """Multiplies the noise multiplier by `gamma` every epoch.

    Args:
        optimizer: the DP optimizer.
        gamma: the factor, above 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    def get_noise_multiplier(self) -> float:
        return self._scheduled()


class LambdaNoise(_NoiseScheduler):
    """Sets the noise multiplier to its first value times a function of the epoch.

    Args:
        optimizer: the DP optimizer.
        noise_lambda: function from the epoch to a factor of at least 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    _function_name = "noise_lambda"

    def __init__(
        self, optimizer: Any, *, noise_lambda: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        self.noise_lambda = check_function("noise_lambda", noise_lambda)
        self.base_noise_multiplier: float = getattr(optimizer, self._attribute, 0.0)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        return self.base_noise_multiplier * self.noise_lambda(self.last_epoch)

    def _factor(self, epoch: int) -> float:
        return self.noise_lambda(epoch)

    def _resumed_value(self, factor: float | None, state: Mapping[str, Any]) -> float:
        return self._next_value()


class StepNoise(Stepwise, _NoiseScheduler):
    """Multiplies the noise multiplier by `gamma` every `step_size` epochs.

    Args:
        optimizer: the DP optimizer.
        step_size: number of epochs between changes, at least 1.
        gamma: the factor, above 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    def get_noise_multiplier(self) -> float:
        return self._scheduled()
