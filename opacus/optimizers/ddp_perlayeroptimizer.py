"""Per-layer clipping over replicas with different samples (DDP)."""

from __future__ import annotations

import torch
from torch import nn

from opacus.core.privacy.clipping import clip_flat
from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer
from opacus.optimizers.utils import weighted_sums


def _clip_and_accumulate_parameter(p: nn.Parameter, max_grad_norm: float) -> None:
    """Clip the per-sample gradients of one parameter and add their sum to ``p.summed_grad``."""
    grad_sample: torch.Tensor = p.grad_sample  # type: ignore[attr-defined]
    norms = grad_sample.reshape(len(grad_sample), -1).norm(2, dim=-1)
    (grad,) = weighted_sums([clip_flat(norms, max_grad_norm)], [grad_sample])
    known: torch.Tensor | None = getattr(p, "summed_grad", None)
    p.summed_grad = grad if known is None else known + grad  # type: ignore[attr-defined]


class SimpleDistributedPerLayerOptimizer(DPPerLayerOptimizer, DistributedDPOptimizer):
    """:class:`DPPerLayerOptimizer` over all ranks, see :class:`DistributedDPOptimizer`."""


class DistributedPerLayerOptimizer(DPPerLayerOptimizer, DistributedDPOptimizer):
    """The same, under the name that Opacus gives to its version for torch's DDP.

    Opacus clips in DDP's gradient hooks; here clipping happens in the step for both
    kinds of DDP, with the noise drawn from the optimizer's own generator.
    """

    def _ddp_per_layer_hook(self, p: nn.Parameter, max_grad_norm: float, _: torch.Tensor) -> None:
        """Opacus' hook for one parameter: clip and accumulate it."""
        _clip_and_accumulate_parameter(p, max_grad_norm)

    def _register_hooks(self) -> None:
        """Nothing to register: clipping happens in the step."""

    def _add_noise_parameter(self, p: nn.Parameter) -> None:
        """Write ``p.summed_grad`` plus noise to ``p.grad``, for one parameter."""
        summed: torch.Tensor = p.summed_grad  # type: ignore[attr-defined]
        noise = self._parallelism.noise(self._privacy.noise_std, summed)
        p.grad = (summed + noise).to(p.dtype)

    def _scale_grad_parameter(self, p: nn.Parameter) -> None:
        """Divide ``p.grad`` by the expected global batch size, for one parameter."""
        if self.loss_reduction == "mean" and p.grad is not None:
            p.grad /= self.expected_batch_size * self.accumulated_iterations * self.world_size
