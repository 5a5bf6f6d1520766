"""Clip rules: per-sample norms in, clipping factors out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Keeps the division finite for a zero gradient; Opacus uses the same value, so
# that trajectories agree.
EPSILON = 1e-6


@dataclass(frozen=True)
class Clipped:
    """What a clip rule decided for one batch.

    Attributes:
        factors: ``[B]``, fp32 or fp64; ``factors[i] * ||g_i|| <= C``, and 0 for
            every sample that must not contribute.
        excluded: ``[B]`` bool, samples whose norm is not finite.
    """

    factors: Tensor
    excluded: Tensor


def clip_flat(norms: Tensor, max_grad_norm: float) -> Clipped:
    """Factors of flat clipping (Abadi et al., arXiv:1607.00133).

    Args:
        norms: ``[B]`` norms of the whole per-sample gradients.
        max_grad_norm: Clipping norm C > 0; ``inf`` leaves every gradient as it is.

    Guarantee: the sum of the weighted per-sample gradients changes by at most C
    in L2 norm when one sample is removed.

    Edge cases: a zero gradient gets factor 1; a NaN or infinite norm gets factor
    0 and is reported as excluded; an empty batch gives empty factors.
    """
    excluded = ~torch.isfinite(norms)
    factors = (max_grad_norm / (norms + EPSILON)).clamp(max=1.0)
    return Clipped(factors.masked_fill(excluded, 0.0), excluded)


def excluded_or_none(excluded: Tensor) -> Tensor | None:
    """``None`` where no sample is excluded, so that nothing has to be masked.

    Only a CPU is asked: to look at a device's memory would make the host wait for it.
    """
    return None if excluded.device.type == "cpu" and not bool(excluded.any()) else excluded


def clip_each(
    norms: Mapping[str, Tensor], limits: Mapping[str, float]
) -> tuple[dict[str, Tensor], Tensor]:
    """Factors of per-layer clipping (McMahan et al., arXiv:1710.06963).

    Args:
        norms: Parameter name -> ``[B]`` norms of its per-sample gradients.
        limits: Parameter name -> its clipping norm C_p.

    Returns:
        Parameter name -> ``[B]`` factors, and the excluded samples ``[B]``: a sample
        with any norm that is not finite contributes to no parameter.

    Guarantee: the sum changes by at most ``sqrt(sum_p C_p^2)`` in L2 norm when one
    sample is removed.
    """
    clipped = {name: clip_flat(value, limits[name]) for name, value in norms.items()}
    excluded = torch.stack([c.excluded for c in clipped.values()]).any(0)
    factors = {n: c.factors.masked_fill(excluded, 0.0) for n, c in clipped.items()}
    return factors, excluded
