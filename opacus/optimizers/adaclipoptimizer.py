"""Adaptive clipping with per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.core.platform.sharded import compute_device
from opacus.core.privacy.clipping import Clipped
from opacus.core.step.adaptive import Quantile, centred_count, private_fraction
from opacus.optimizers.optimizer import DPOptimizer


class AdaClipDPOptimizer(DPOptimizer):
    """:class:`DPOptimizer` whose C follows a quantile of the norms (arXiv:1905.03871).

    After each step C moves towards the norm below which the fraction
    ``target_unclipped_quantile`` of the samples lies. The count that tells is released
    with noise and shares the budget: the gradient gets somewhat more noise than
    ``noise_multiplier`` says, and both together cost what it says.

    Args:
        target_unclipped_quantile: Fraction of samples that should stay unclipped.
        clipbound_learning_rate: Step of the geometric update of C.
        max_clipbound: Largest C.
        min_clipbound: Smallest C.
        unclipped_num_std: Standard deviation of the noise on the count, above
            ``noise_multiplier / 2``; the paper takes a twentieth of the expected batch.

    The other arguments are those of :class:`DPOptimizer`.

    Raises:
        ValueError: ``max_clipbound <= min_clipbound``, or ``noise_multiplier >= 2 *
            unclipped_num_std``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        target_unclipped_quantile: float = 0.5,
        clipbound_learning_rate: float = 0.2,
        max_clipbound: float = 1e8,
        min_clipbound: float = 1,
        unclipped_num_std: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        self._quantile = Quantile(
            target_unclipped_quantile, clipbound_learning_rate, min_clipbound, max_clipbound
        )
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            **kwargs,
        )
        self._privacy.count_noise_std = unclipped_num_std
        self.target_unclipped_quantile = target_unclipped_quantile
        self.clipbound_learning_rate = clipbound_learning_rate
        self.max_clipbound = max_clipbound
        self.min_clipbound = min_clipbound
        self.unclipped_num_std = unclipped_num_std
        self._forget_counts()

    def _clip(self, used: list[nn.Parameter], samples: list[Tensor]) -> list[Clipped]:
        clipped = super()._clip(used, samples)
        if clipped:
            unclipped = clipped[0].factors >= 1
            self.sample_size += unclipped.numel()
            self.unclipped_num += int(unclipped.sum())
            self._count += centred_count(unclipped)
        return clipped

    def update_max_grad_norm(self) -> None:
        """Move C by one step, from the private count of the step's unclipped samples."""
        batch = self.expected_batch_size or max(self.sample_size, 1)
        batch *= self._parallelism.world_size
        device = compute_device(self.params[0])
        fraction = private_fraction(
            self._count, self.unclipped_num_std, batch, self._parallelism, device
        )
        self.max_grad_norm = self._quantile.update(self.max_grad_norm, fraction)
        self._forget_counts()

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Everything before the wrapped optimizer's step; then C for the next one."""
        full = super().pre_step(closure)
        if full and self.params:
            self.update_max_grad_norm()
        return full

    def _forget_step(self) -> None:
        super()._forget_step()
        self._forget_counts()

    def _forget_counts(self) -> None:
        self.sample_size, self.unclipped_num, self._count = 0, 0, 0.0
