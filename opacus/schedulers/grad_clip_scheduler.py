"""Schedulers of the clipping threshold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opacus.schedulers._value_scheduler import (
    ValueScheduler,
    check_function,
    check_gamma,
    check_step_size,
    exponential_factor,
    power,
    step_factor,
)


class _GradClipScheduler(ValueScheduler):
    """Base of the schedulers that set ``optimizer.max_grad_norm``.

    The noise is scaled by the same threshold, so the privacy cost does not change.
    """

    _attribute = "max_grad_norm"

    def get_max_grad_norm(self) -> float:
        """Returns the clipping threshold to set at epoch `last_epoch`."""
        raise NotImplementedError

    def _next_value(self) -> float:
        return self.get_max_grad_norm()


class ExponentialGradClip(_GradClipScheduler):
    """Multiplies the clipping threshold by `gamma` every epoch.

    Args:
        optimizer: the DP optimizer.
        gamma: the factor, above 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = check_gamma(gamma)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        return self._current() * exponential_factor(self.last_epoch, self.gamma)

    def _factor(self, epoch: int) -> float:
        return power(self.gamma, epoch)


class LambdaGradClip(_GradClipScheduler):
    """Sets the clipping threshold to its first value times a function of the epoch.

    Args:
        optimizer: the DP optimizer.
        scheduler_function: function from the epoch to a factor above 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    _function_name = "scheduler_function"

    def __init__(
        self, optimizer: Any, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        self.scheduler_function = check_function("scheduler_function", scheduler_function)
        self.base_max_grad_norm: float = getattr(optimizer, self._attribute, 0.0)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        return self.base_max_grad_norm * self.scheduler_function(self.last_epoch)

    def _factor(self, epoch: int) -> float:
        return self.scheduler_function(epoch)

    def _resumed_value(self, factor: float | None, state: Mapping[str, Any]) -> float:
        return self._next_value()


class StepGradClip(_GradClipScheduler):
    """Multiplies the clipping threshold by `gamma` every `step_size` epochs.

    Args:
        optimizer: the DP optimizer.
        step_size: number of epochs between changes, at least 1.
        gamma: the factor, above 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    def __init__(
        self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1
    ) -> None:
        self.step_size = check_step_size(step_size)
        self.gamma = check_gamma(gamma)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        return self._current() * step_factor(self.last_epoch, self.step_size, self.gamma)

    def _factor(self, epoch: int) -> float:
        return power(self.gamma, epoch // self.step_size)
