"""The per-sample gradients that hooks have left in an optimizer's parameters."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from opacus.core.privacy.gradients import is_processed


class PerSampleGradients:
    """Reads ``p.grad_sample`` of the parameters of an optimizer."""

    reads_samples: ClassVar[bool] = True  # a step leaves out what is in ``p.grad``
    params: list[nn.Parameter]  # those that are trained

    def _get_flat_grad_sample(self, p: Tensor) -> Tensor:
        """``[B, *shape]`` per-sample gradients of ``p``, all accumulated batches joined.

        Raises:
            ValueError: ``p`` has no per-sample gradient.
        """
        if not hasattr(p, "grad_sample"):
            raise ValueError(
                "Per sample gradient not found. Are you using GradSampleModule (or "
                "PrivacyEngine.make_private) on the model that this optimizer updates?"
            )
        grad_sample = p.grad_sample
        if grad_sample is None:
            raise ValueError(
                f"Per sample gradient is not initialized for a parameter of shape "
                f"{tuple(p.shape)}. Not updated in backward pass? Call backward() on a loss of the "
                "private model, in train mode, before each step()"
            )
        if isinstance(grad_sample, Tensor):
            return grad_sample
        if isinstance(grad_sample, list):
            return torch.cat(grad_sample, dim=0)
        raise ValueError(f"Unexpected grad_sample type: {type(grad_sample)}")

    @property
    def grad_samples(self) -> list[Tensor]:
        """Per-sample gradients ``[B, *shape]``, one tensor a parameter."""
        return [self._get_flat_grad_sample(p) for p in self.params]

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches accumulated since the last step, for averaging and accounting.

        Raises:
            ValueError: Parameters disagree, so some were left out of a backward pass.
        """
        counts = {
            len(grads) if isinstance(grads, list) else 1
            for grads in (getattr(p, "grad_sample", None) for p in self.params)
            if grads is not None
        }
        if len(counts) > 1:
            raise ValueError(
                f"Number of accumulated steps is inconsistent across parameters: {sorted(counts)}"
            )
        return counts.pop() if counts else 1

    @property
    def unreleased(self) -> list[nn.Parameter]:
        """See :class:`opacus.optimizers.wrapped.WrappedOptimizer`."""
        return self._recorded()

    def _recorded(self) -> list[nn.Parameter]:
        """Parameters with per-sample gradients that no step has used."""
        samples = [(p, getattr(p, "grad_sample", None)) for p in self.params]
        each = [(p, s if isinstance(s, list) else [s]) for p, s in samples if s is not None]
        return [p for p, tensors in each if not all(map(is_processed, tensors))]

    def _used_parameters(self) -> list[nn.Parameter]:
        """Parameters with per-sample gradients; the others took no part in the batch.

        Raises:
            ValueError: No parameter has any, or one was used but not recorded.
        """
        used = [p for p in self.params if getattr(p, "grad_sample", None) is not None]
        for parameter in self.params:
            missing = getattr(parameter, "grad_sample", None) is None
            grad = parameter.grad
            if missing and grad is not None and not is_processed(grad) and bool(grad.any()):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient but no "
                    "per-sample gradients, so it cannot be clipped: it was used outside its "
                    "layer's forward or in eval mode. Use it through its own layer and in train "
                    "mode, or freeze it"
                )
        if not used and self.params:
            self._get_flat_grad_sample(self.params[0])
        return used

    def _samples(self) -> int:
        """Number of samples in the batches since the last step, physical ones included."""
        grads = self._used_parameters()[0].grad_sample
        return sum(map(len, grads)) if isinstance(grads, list) else len(grads)
