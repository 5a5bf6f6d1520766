"""AdamW that knows how much of its second moments is noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class DPAdamW(Optimizer):
    """AdamW whose second moments are without the noise's share (DP-AdamBC, arXiv 2312.14334).

    Squared private gradients are too large by the variance of their noise, the same for all
    elements, so that ordinary Adam divides nearly all of them by one number. The variance is public
    and is subtracted. A plain optimizer over private gradients: wrapped by ``make_private``, it is
    told the noise of each step; anywhere else set :attr:`noise_std` before ``step()``.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay of the first and of the second moments, in [0, 1).
        floor: Least second moment that is divided by the root of; larger ones are steadier.
        weight_decay: As in ``torch.optim.AdamW``.

    Attributes:
        noise_std: Standard deviation of the noise of one element of the gradients.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and all(0 <= beta < 1 for beta in betas) and floor > 0 <= weight_decay):
            raise ValueError(
                "lr and weight_decay must be at least 0, betas in [0, 1) and floor above 0, got "
                f"{lr!r}, {weight_decay!r}, {betas!r} and {floor!r}"
            )
        defaults = {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay}
        # Steps taken, and the decaying mean of the noise's variance, which may change.
        super().__init__(params, {**defaults, "steps": 0, "noise": 0.0})
        self.noise_std = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Evaluates the loss again, if given.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            group["steps"] += 1
            group["noise"] = second * group["noise"] + (1 - second) * self.noise_std**2
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, first, second)
        return loss

    def _update(
        self, parameter: Tensor, grad: Tensor, group: dict[str, Any], first: float, second: float
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        steps = group["steps"]
        signal = (square - group["noise"]).div_(1 - second**steps).clamp_(min=group["floor"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, signal.sqrt_(), value=-group["lr"] / (1 - first**steps))


def tell_noise(optimizer: Any, std: float) -> None:
    """Tell an optimizer that needs it the noise of the coming gradients."""
    if math.isfinite(std):
        optimizer.noise_std = std
