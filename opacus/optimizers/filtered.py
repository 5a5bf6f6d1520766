"""DiSK: a Kalman filter on private gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FILTERED, _OTHER = "filtered_grad", "other_point"


class DiSK(Optimizer):
    """Steps with filtered gradients, of points a little ahead (DiSK, arXiv 2410.03883).

    The filter keeps ``(1 - kappa)`` of the estimate before and takes ``kappa`` of the new private
    gradient. What the estimate misses by the step in between is made up for by where the gradient
    is taken: at ``x + gamma d``, with the last step d and ``gamma = (1 - kappa) / kappa``, the
    choice with which DiSK needs one gradient. It sees private gradients alone: no cost in privacy.

    While training, the model's parameters are that point ahead. Call :meth:`eval` before the model
    is evaluated, saved by itself or released, and :meth:`train` before training goes on::

        optimizer = DiSK(torch.optim.AdamW(model.parameters(), lr=1e-3))
        model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, ...)

    Args:
        optimizer: What steps with the filtered gradients; its groups and state are this one's.
        kappa: In (0, 1]; 1 filters nothing. Smaller values for more noise.

    Raises:
        ValueError: ``kappa`` is out of range, or the optimizer asks what the noise is.
    """

    def __init__(self, optimizer: Optimizer, kappa: float = 0.7) -> None:
        if not 0 < kappa <= 1:
            raise ValueError(f"kappa must be in (0, 1], got {kappa!r}")
        for name in ("noise_std", "gradient_scales"):
            if hasattr(optimizer, name):
                raise ValueError(
                    f"optimizer is a {type(optimizer).__name__}, which is made for gradients as "
                    "they are released: use torch.optim.AdamW, SGD or another of torch's in DiSK"
                )
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        for group in optimizer.param_groups:
            group.update({"kappa": kappa, "ahead": True})
        self.__setstate__({})  # step and state hooks of torch, which asks for groups otherwise

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer, with ``kappa`` and whether parameters are ahead."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """That of the optimizer, with the filtered gradient and the point itself."""
        return self.optimizer.state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = value

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` returned; the model's parameters must be from the same time."""
        self.optimizer.load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Evaluates the loss again, if given.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: Parameters are those for evaluation.
        """
        if not all(group["ahead"] for group in self.param_groups):
            raise RuntimeError(
                "the parameters are where optimizer.eval() has put them, but gradients are taken "
                "ahead: call optimizer.train() before training goes on"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        held = [self._filter(parameter, group["kappa"]) for parameter, group in stepped]
        self.optimizer.step()
        for (parameter, group), (estimate, before) in zip(stepped, held, strict=True):
            state = self.state[parameter]
            state[_FILTERED] = estimate
            gamma = (1 - group["kappa"]) / group["kappa"]
            ahead = parameter + gamma * (parameter - before)
            state[_OTHER] = before.copy_(parameter)
            parameter.copy_(ahead)
        return loss

    def _filter(self, parameter: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
        """Put the estimate in the gradient's place, and the parameter back from ahead.

        What this optimizer holds is no state while the other one steps, which makes its own where
        there is none.

        Returns:
            The estimate, and where the parameter is.
        """
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        estimate, before = state.pop(_FILTERED, None), state.pop(_OTHER, None)
        if estimate is None or before is None:  # the first step: nothing is ahead
            return grad.clone(), parameter.clone()
        estimate.lerp_(grad, kappa)
        grad.copy_(estimate)
        parameter.copy_(before)
        return estimate, before

    def eval(self) -> None:
        """Put parameters where the steps have led to."""
        self._place(ahead=False)

    def train(self) -> None:
        """Put parameters ahead, where gradients are taken."""
        self._place(ahead=True)

    @torch.no_grad()
    def _place(self, ahead: bool) -> None:
        for group in self.param_groups:
            if group["ahead"] == ahead:
                continue
            group["ahead"] = ahead
            for parameter in group["params"]:
                other = self.state[parameter].get(_OTHER) if parameter in self.state else None
                if other is not None:
                    here = parameter.clone()
                    parameter.copy_(other)
                    other.copy_(here)
