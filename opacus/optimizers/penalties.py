"""Penalties on parameters, which see no data and so need no clipping and no noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opacus.core.platform.sharded import is_dtensor


class PenalizedOptimizer:
    """Adds the gradients of declared penalties to the private gradient, after the noise."""

    params: list[nn.Parameter]
    _penalties: tuple[Callable[[], Tensor], ...] = ()

    def add_penalty(self, penalty: Callable[[], Tensor]) -> None:
        """Add a term to the loss that depends on the parameters alone.

        Guarantee: none is needed for it, as long as it computes nothing from private data.

        Args:
            penalty: Called in each step; returns the term, ``[]``, its weight included. An
                orthogonality term, say, over ``model.named_parameters()``.

        Raises:
            ValueError: It returns no differentiable number.
        """
        with torch.enable_grad():
            value = penalty()
        if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                "the penalty must return one number computed from the parameters with gradients, "
                f"a tensor of shape (); got {got}"
            )
        self._penalties = (*self._penalties, penalty)

    def add_penalties(self) -> None:
        """Add the penalties' gradients to ``p.grad``, which is private now."""
        if not self._penalties:
            return
        parameters = [p for p in self.params if p.grad is not None]
        for penalty in self._penalties:
            with torch.enable_grad():
                value = penalty()
                value = value.full_tensor() if is_dtensor(value) else value
            for parameter, grad in zip(
                parameters, torch.autograd.grad(value, parameters, allow_unused=True), strict=True
            ):
                if is_dtensor(grad) and is_dtensor(parameter):
                    grad = grad.redistribute(parameter.device_mesh, parameter.placements)
                if grad is not None:
                    assert parameter.grad is not None
                    parameter.grad.add_(grad)
