"""Adaptive clipping: C follows a private quantile of the norms (arXiv:1905.03871)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.core.ranks.parallelism import Single


@dataclass(frozen=True)
class Quantile:
    """How C follows the norms.

    Attributes:
        target: Fraction of the samples that should stay unclipped.
        learning_rate: Step of the geometric update.
        minimum: Smallest C.
        maximum: Largest C.
    """

    target: float
    learning_rate: float
    minimum: float
    maximum: float

    def __post_init__(self) -> None:
        if self.maximum <= self.minimum:
            raise ValueError(
                f"max_clipbound must be larger than min_clipbound, got {self.maximum} and "
                f"{self.minimum}"
            )

    def update(self, clip: float, unclipped_fraction: float) -> float:
        """The next C."""
        step = math.exp(-self.learning_rate * (unclipped_fraction - self.target))
        return min(max(clip * step, self.minimum), self.maximum)


def centred_count(unclipped: Tensor) -> float:
    """``sum_i (b_i - 1/2)`` of unclipped flags ``[B]``: one sample changes it by 1/2."""
    return float(unclipped.sum()) - unclipped.numel() / 2


def private_fraction(
    count: float, std: float, batch: float, parallelism: Single, device: torch.device
) -> float:
    """Noised fraction of unclipped samples over all ranks, the same number on each.

    Args:
        count: This rank's :func:`centred_count`.
        std: Standard deviation of the noise on the count.
        batch: Public number of samples to divide by: the expected global batch size.
        parallelism: Where the samples are.
        device: Device for the reduction.
    """
    value = torch.tensor([count], dtype=torch.float32, device=device)
    value = parallelism.noised_count(std, value)
    if parallelism.world_size > 1:
        dist.all_reduce(value)
    return float(value) / batch + 0.5
