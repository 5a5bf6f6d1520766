"""Schedulers of the clipping threshold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opacus.schedulers._value_scheduler import (
    Exponential,
    Stepwise,
    ValueScheduler,
    check_function,
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


class ExponentialGradClip(Exponential, _GradClipScheduler):
    """Multiplies the clipping threshold by `gamma` every epoch.

    Args:
        optimizer: the DP optimizer.
        gamma: the factor, above 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    def get_max_grad_norm(self) -> float:
        return self._scheduled()


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


class StepGradClip(Stepwise, _GradClipScheduler):
    """Multiplies the clipping threshold by `gamma` every `step_size` epochs.

    Args:
        optimizer: the DP optimizer.
        step_size: number of epochs between changes, at least 1.
        gamma: the factor, above 0.
        last_epoch: epoch to go on from; -1 at the start.
    """

    def get_max_grad_norm(self) -> float:
        return self._scheduled()
