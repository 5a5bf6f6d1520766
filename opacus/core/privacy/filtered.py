"""Noise that depends on all earlier draws, through a few buffers for each parameter.

The buffers hold what the counter has made, and nothing of the data: where they are missing (after a
checkpoint, on another number of ranks, for a parameter that was frozen) they are made again from
the run's first step, one draw a step, bit for bit the same. So no checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opacus.core.kernels.noise.gaussian import GRID, grid_of
from opacus.core.kernels.noise.gaussian_reference import rounded
from opacus.core.kernels.norms.reference import wide_dtype
from opacus.core.platform.sharded import locals_of
from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.core.privacy.key import NOISE, RunKey
from opacus.core.privacy.noise import add_noise


@dataclass
class _Held:
    """Of one parameter: the draws up to (not with) number ``end`` are in the tensors."""

    end: int
    tensors: list[Tensor] = field(default_factory=list)


class Buffers:
    """The buffers of all parameters of a run, by name; of sharded ones, this rank's part.

    Args:
        plan: With buffers, or with a strategy, whose earlier noise is held then.
    """

    def __init__(self, plan: CorrelatedNoise) -> None:
        self._plan = plan
        self._count = len(plan.buffers) or len(plan.strategy) - 1
        self._held: dict[str, _Held] = {}

    def clear(self) -> None:
        """Make them again when they are needed."""
        self._held.clear()

    def add(
        self,
        std: float,
        sums: Sequence[tuple[Tensor, Tensor, str]],
        key: RunKey,
        numbers: tuple[int, int],
        secure: bool,
        part: float | None,
        divisor: float = 1.0,
    ) -> None:
        """Write sums with a step's noise to where they go.

        Args:
            std, sums, key, secure, part, divisor: See :func:`opacus.core.privacy.noise.add_noise`.
            numbers: Of the run's first step, and of this one.
        """
        white = [torch.zeros_like(t, dtype=wide_dtype(t, place)) for t, place, _ in sums]
        own, names = locals_of(white), [name for _, _, name in sums]
        states = self._states(names, own, *numbers)
        for number in range(min(state.end for state in states), numbers[1] + 1):
            torch._foreach_zero_(own)
            draws = [(w, w, name) for w, name in zip(white, names, strict=True)]
            add_noise(std, draws, key, NOISE, secure, number, part=0.0)
            self._filter(states, own)
            for state in states:
                state.end = number + 1
        part = GRID if part is None and secure else part
        grid = grid_of(std, part) if part else 0.0
        totals, places = (locals_of(tensors) for tensors in list(zip(*sums, strict=True))[:2])
        for noise, total, place in zip(own, totals, places, strict=True):
            place.copy_(rounded(noise.add_(total), grid).div_(divisor))

    def _states(
        self, names: Sequence[str], like: Sequence[Tensor], first: int, number: int
    ) -> list[_Held]:
        """What is held of these parameters, all up to one step; empty buffers where that is not."""
        known = [self._held.get(name) for name in names]
        fits = [
            state is not None and state.end <= number and all(_alike(t, w) for t in state.tensors)
            for state, w in zip(known, like, strict=True)
        ]
        ends = {state.end for state in known if state is not None}
        if len(ends) != 1 or not all(fits):
            for name, w in zip(names, like, strict=True):
                tensors = [torch.zeros_like(w) for _ in range(self._count)]
                self._held[name] = _Held(first, tensors)
        return [self._held[name] for name in names]

    def _filter(self, states: Sequence[_Held], white: list[Tensor]) -> None:
        """Turn white draws into the noise of their step, in place, and take them up."""
        if not self._count:
            return
        held = [[state.tensors[place] for state in states] for place in range(self._count)]
        if self._plan.buffers:
            drawn = [draw.clone() for draw in white]
            for (scale, decay), tensors in zip(self._plan.buffers, held, strict=True):
                torch._foreach_add_(white, tensors, alpha=scale)
                torch._foreach_mul_(tensors, decay)
                torch._foreach_add_(tensors, drawn)
            return
        for weight, tensors in zip(self._plan.strategy[1:], held, strict=True):
            torch._foreach_add_(white, tensors, alpha=-weight)
        torch._foreach_copy_(held[-1], white)
        for state in states:  # the latest noise comes first
            state.tensors.insert(0, state.tensors.pop())


def _alike(held: Tensor, own: Tensor) -> bool:
    return (held.shape, held.dtype, held.device) == (own.shape, own.dtype, own.device)
