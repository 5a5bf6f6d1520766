"""Clip rules: per-sample norms in, clipping factors out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Keeps the division finite for a zero gradient; Opacus uses the same value, so
# that trajectories agree.
EPSILON = 1e-6
# Of AUTO-S and of PSAC, as in their papers; no gradient is enlarged more than C / these.
_STABILITY = 0.01
_REACH = 0.1


class Factors(ABC):
    """What a clip rule decided for one batch, whichever rule it was.

    Attributes:
        excluded: ``[B]`` bool, samples whose norm is not finite.
        shared: ``[B]`` factors of all parameters alike; ``None`` if each has its own.
    """

    excluded: Tensor
    shared: Tensor | None = None

    @abstractmethod
    def of(self, owner: str) -> Tensor:
        """``[B]`` factors of one parameter of the model, by its name."""

    @cached_property
    def masked(self) -> Tensor | None:
        """:attr:`excluded`, or ``None`` if the host knows that there are none."""
        return excluded_or_none(self.excluded)


@dataclass(frozen=True)
class Clipped(Factors):
    """Factors of flat clipping: each sample has one.

    Attributes:
        factors: ``[B]``, fp32 or fp64; ``factors[i] * ||g_i|| <= C``, and 0 for
            every sample that must not contribute.
        excluded: ``[B]`` bool, samples whose norm is not finite.
    """

    factors: Tensor
    excluded: Tensor

    def of(self, owner: str) -> Tensor:
        """See :class:`Factors`."""
        return self.factors

    @property
    def shared(self) -> Tensor:  # type: ignore[override]
        """See :class:`Factors`."""
        return self.factors


@dataclass(frozen=True)
class ClippedEach(Factors):
    """Factors of per-layer clipping.

    Attributes:
        by_name: Parameter name -> ``[B]`` factors; those of others, which took no part, are 0.
        excluded: ``[B]`` bool, samples with any norm that is not finite.
    """

    by_name: Mapping[str, Tensor]
    excluded: Tensor

    def of(self, owner: str) -> Tensor:
        """See :class:`Factors`."""
        known = self.by_name.get(owner)
        return torch.zeros_like(self.excluded, dtype=torch.float32) if known is None else known


def _threshold(norms: Tensor, limit: float) -> Tensor:
    """Gradients longer than C are shortened (Abadi et al., arXiv:1607.00133)."""
    return (limit / (norms + EPSILON)).clamp(max=1.0)


def _normalised(norms: Tensor, limit: float) -> Tensor:
    """AUTO-S: all gradients get about length C, small ones less (Bu et al., arXiv:2206.07136)."""
    return limit / (norms + _STABILITY)


def _adaptive(norms: Tensor, limit: float) -> Tensor:
    """PSAC: small gradients are not enlarged without end (Xia et al., arXiv:2212.00328)."""
    return limit / (norms + _REACH / (norms + _REACH))


# Rules that look at a sample's whole norm n: factor * n <= C for every n >= 0.
FLAT_RULES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "flat": _threshold,
    "normalised": _normalised,
    "psac": _adaptive,
}


def clip_flat(norms: Tensor, max_grad_norm: float, rule: str = "flat") -> Clipped:
    """Factors of clipping by the norm of a sample's whole gradient.

    Args:
        norms: ``[B]`` norms of the whole per-sample gradients.
        max_grad_norm: Clipping norm C > 0; with the rule ``"flat"``, ``inf`` leaves every gradient
            as it is.
        rule: One of ``FLAT_RULES``.

    Guarantee: the sum of the weighted per-sample gradients changes by at most C
    in L2 norm when one sample is removed.

    Edge cases: a zero gradient gets a finite factor; a NaN or infinite norm gets factor
    0 and is reported as excluded; an empty batch gives empty factors.
    """
    excluded = ~torch.isfinite(norms)
    factors = FLAT_RULES[rule](norms, max_grad_norm)
    return Clipped(factors.masked_fill(excluded, 0.0), excluded)


def excluded_or_none(excluded: Tensor) -> Tensor | None:
    """``None`` where no sample is excluded, so that nothing has to be masked.

    Only a CPU is asked: to look at a device's memory would make the host wait for it.
    """
    return None if excluded.device.type == "cpu" and not bool(excluded.any()) else excluded


def read_excluded(excluded: Tensor) -> Tensor | None:
    """:func:`excluded_or_none`, with the answer of a GPU, too, for which the host waits.

    Worth it where otherwise all that layers recorded would have to be masked.
    """
    if not excluded.is_cuda or torch.cuda.is_current_stream_capturing():
        return excluded_or_none(excluded)
    answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    answer.copy_(excluded.any(), non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(excluded.device))
    there.synchronize()
    return excluded if bool(answer) else None


def clip_each(norms: Mapping[str, Tensor], limits: Mapping[str, float]) -> ClippedEach:
    """Factors of per-layer clipping (McMahan et al., arXiv:1710.06963).

    Args:
        norms: Parameter name -> ``[B]`` norms of its per-sample gradients.
        limits: Parameter name -> its clipping norm C_p.

    A sample with any norm that is not finite contributes to no parameter.

    Guarantee: the sum changes by at most ``sqrt(sum_p C_p^2)`` in L2 norm when one
    sample is removed.

    Raises:
        ValueError: A parameter has no clipping norm; names it.
    """
    unlimited = [name for name in norms if name not in limits]
    if unlimited:
        raise ValueError(
            f"parameters {unlimited[:5]} have no clipping norm: they were frozen in make_private, "
            "which takes one norm for each trainable parameter. Make them trainable before"
        )
    clipped = {name: clip_flat(value, limits[name]) for name, value in norms.items()}
    excluded = torch.stack([c.excluded for c in clipped.values()]).any(0)
    by_name = {n: c.factors.masked_fill(excluded, 0.0) for n, c in clipped.items()}
    return ClippedEach(by_name, excluded)
