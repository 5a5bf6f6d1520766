"""Correlated noise: the noise of a step takes back a part of that of the steps before it.

The sum of the gradients up to each step then has far less noise than with independent draws, for
the same privacy of the whole run (matrix factorisation, arXiv 2202.08312). The noise of step t is
``sum_j weights[j] z[t - j]`` of white draws z, which the run's counter makes again: nothing is
stored, and each rank makes its own shard's.

Why it is private: with W the banded Toeplitz matrix of the weights, the released gradients are
``G + W Z = W (C G + Z)``, where ``C = W^-1``. So they tell no more than ``C G + Z``, one Gaussian
mechanism over the whole run, whose sensitivity is that of ``C G``: the white draws have
``noise_multiplier * max_grad_norm`` times :attr:`CorrelatedNoise.sensitivity` as their deviation.
It holds for gradients that depend on what was released before (arXiv 2202.08312, theorem 2.1).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from opacus.core.privacy.key import RunKey


@dataclass(frozen=True)
class CorrelatedNoise:
    """The correlation of a run's noise, and how often a sample takes part.

    Attributes:
        weights: Of the white draws of this step and of those before it; the first is 1.
        steps: Most steps that the run may take.
        separation: Two steps in which one sample takes part are at least so many apart;
            ``steps`` if it takes part once.

    Raises:
        ValueError: A value is out of range.
    """

    weights: tuple[float, ...]
    steps: int
    separation: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        if not self.weights or self.weights[0] != 1.0 or not all(map(math.isfinite, self.weights)):
            raise ValueError(f"weights must be finite and begin with 1, got {self.weights}")
        for name in ("steps", "separation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")

    @classmethod
    def square_root(
        cls, bands: int, *, steps: int, separation: int | None = None
    ) -> CorrelatedNoise:
        """The banded inverse square root of prefix sums (BISR, arXiv 2505.12128).

        Args:
            bands: Number of weights: what a step costs, in white draws. 1 is DP-SGD.
            steps: See the class.
            separation: See the class; by default a sample takes part once.
        """
        if bands < 1:
            raise ValueError(f"bands must be at least 1, got {bands!r}")
        weights = [1.0]  # coefficients of (1 - x)^(1/2)
        for place in range(1, bands):
            weights.append(weights[-1] * (place - 1.5) / place)
        return cls(tuple(weights), steps, steps if separation is None else separation)

    @classmethod
    def optimised(
        cls, bands: int, *, steps: int, separation: int | None = None, rounds: int = 60
    ) -> CorrelatedNoise:
        """Weights with a small mean squared error of prefix sums (BandInvMF, arXiv 2505.12128).

        Found by descent from :meth:`square_root`: never worse, and clearly better with few bands.

        Args:
            bands, steps, separation: See :meth:`square_root`.
            rounds: Most iterations of the search.
        """
        known = cls.square_root(bands, steps=steps, separation=separation)
        tail = torch.tensor(known.weights[1:], dtype=torch.float64, device="cpu")
        if not len(tail):
            return known
        tail.requires_grad_(True)
        search = torch.optim.LBFGS(
            [tail], lr=0.1, max_iter=rounds, line_search_fn="strong_wolfe", tolerance_change=1e-6
        )

        def loss() -> Tensor:
            search.zero_grad()
            value = _log_error(tail, steps, known.separation)
            if not math.isfinite(float(value.detach())):  # C explodes: not that far
                value = _FAR + 0.0 * tail.sum()
            value.backward()
            return value.detach()

        with torch.enable_grad():
            search.step(loss)  # type: ignore[arg-type]
        found = tail.detach().tolist()
        if not all(map(math.isfinite, found)):
            return known
        made = cls((1.0, *found), steps, known.separation)
        return min(known, made, key=lambda plan: math.fsum(plan.squared_errors()))

    @functools.cached_property
    def sensitivity(self) -> float:
        """Largest ``||C u||`` over all allowed participations, for gradients of norm 1.

        Exact where C's coefficients fall and are not negative (arXiv 2405.13763, theorem 2), as
        those of :meth:`square_root` are; otherwise of a matrix that exceeds them, which bounds it.
        """
        falling = list(accumulate(map(abs, reversed(self._inverse())), max))[::-1]
        total = [0.0] * self.steps
        for start in range(0, self.steps, self.separation):
            for place in range(start, self.steps):
                total[place] += falling[place - start]
        return math.sqrt(math.fsum(value * value for value in total))

    def _inverse(self) -> list[float]:
        """The first ``steps`` coefficients of C."""
        past = self.weights[1:]
        found = [1.0]
        for place in range(1, self.steps):
            reach = min(len(past), place)
            found.append(-math.fsum(past[j] * found[place - 1 - j] for j in range(reach)))
        return found

    def squared_errors(self) -> list[float]:
        """Of the noise in the sum of the first 1, 2, ... gradients, ``[steps]``.

        In units of ``(noise_multiplier * max_grad_norm)^2`` and for one element. Of independent
        noise they are 1, 2, ..., times the most steps that a sample takes part in.
        """
        weights = [*self.weights, *[0.0] * self.steps][: self.steps]
        of_draws = accumulate(sum_ * sum_ for sum_ in accumulate(weights))
        return [self.sensitivity**2 * value for value in of_draws]


def _log_error(tail: Tensor, steps: int, separation: int) -> Tensor:
    """Logarithm of the mean squared error of prefix sums, for coefficients of C that fall.

    Args:
        tail: ``[bands - 1]``, the weights but for the first.
        steps, separation: See :class:`CorrelatedNoise`.
    """
    weights = torch.cat([tail.new_ones(1), tail])[:steps]
    weights = torch.cat([weights, tail.new_zeros(steps - len(weights))])
    inverse, known = tail.new_ones(1), 1
    while known < steps:  # Newton's iteration for 1 / w of power series
        known = min(2 * known, steps)
        size = 4 * known
        spectrum = torch.fft.rfft(inverse, size)
        product = spectrum * (2 - torch.fft.rfft(weights[:known], size) * spectrum)
        inverse = torch.fft.irfft(product, size)[:known]
    total = sum(
        torch.cat([tail.new_zeros(start), inverse[: steps - start]])
        for start in range(0, steps, separation)
    )
    left = torch.arange(steps, 0, -1, dtype=torch.float64, device="cpu")
    error = (left * weights.cumsum(0).square()).sum()
    return torch.as_tensor(total).square().sum().log() + error.log()


# Above every logarithm of an error.
_FAR = 1e6


class Split(Protocol):
    """The parts that the data were split into: what draws batches."""

    @property
    def key(self) -> RunKey:
        """What the split was drawn with."""

    def __len__(self) -> int:
        """Number of parts."""


class Correlation:
    """Correlated noise of one run: its start, and when each part of the data took part.

    Args:
        plan: What it keeps to.
        split: Of the data. ``None`` in a copy, which takes no step.

    Attributes:
        plan: As given.
        charged: Whether the accountant knows of the run, all steps of which are one mechanism.
        spread: Deviation of the latest step's noise relative to that of its own draws.
    """

    def __init__(self, plan: CorrelatedNoise, split: Split | None = None) -> None:
        self.plan, self.split = plan, split
        self.charged = False
        self.spread = 1.0
        self._first: int | None = None  # number of the first step
        self._std: float | None = None  # of the white draws
        self._parts: str | None = None  # names the split that the first step was of
        self._part, self._shift = -1, -math.inf  # of the latest batch

    def take_part(self, part: int, number: int) -> None:
        """The step of this number is of this part of the data.

        Args:
            part: Each sample is in one part, in all passes the same.
            number: Of the step.

        Raises:
            RuntimeError: Samples of the part may have taken part too recently.
        """
        if self.split is None:
            raise RuntimeError(
                "a copy of an optimizer with correlated noise has no data loader: make_private "
                "makes another optimizer"
            )
        parts = f"{len(self.split)} parts by {self.split.key.key.identifier}"
        # Parts come in order, so in a pass the shift must not fall; the next pass is later by a
        # whole separation for all parts if it is for the first.
        shift = number - part
        least = self._shift if part > self._part else self._shift + self.plan.separation
        if shift < least or parts != (self._parts or parts):
            raise RuntimeError(
                f"samples of the batch number {part} of this pass, in step {number}, may have "
                "taken part too short a time ago: with correlated noise there must be "
                f"{self.plan.separation} steps in between. Take a step with every batch of the "
                "private loader, in its order, go through whole passes, and leave its batches "
                "what they are"
            )
        self._parts, self._part, self._shift = parts, part, shift

    def past(self, number: int, std: float) -> list[tuple[float, int]]:
        """Weights and numbers of the earlier steps whose draws belong to a step's noise.

        Args:
            number: Of the step.
            std: Standard deviation of its white draw.

        Raises:
            RuntimeError: The run is over, or its noise has been changed.
        """
        first = number if self._first is None else self._first
        if number - first >= self.plan.steps:
            raise RuntimeError(
                f"all {self.plan.steps} steps of the correlated noise have been taken, and its "
                "sensitivity is for no more: make a new CorrelatedNoise with more steps before "
                "training begins"
            )
        if self._std is not None and not math.isclose(std, self._std, rel_tol=1e-9):
            raise RuntimeError(
                f"the noise's deviation was {self._std:g} when the run began and would be {std:g}: "
                "with correlated noise noise_multiplier and max_grad_norm must not change"
            )
        self._first, self._std = first, std
        weights = self.plan.weights[1 : number - first + 1]
        self.spread = math.hypot(1.0, *weights)
        return [(w, number - age) for age, w in enumerate(weights, start=1) if w]

    def state_dict(self) -> dict[str, Any]:
        """Plain types. They hold the secret of the split, without which it could not go on."""
        split = None if self.split is None else self.split.key.key.secret.hex()
        own = {name: value for name, value in vars(self).items() if name in _STATE}
        return {**own, "plan": self._described(), "split": split}

    def check(self, state: Any) -> None:
        """Refuse the state of a run with other noise.

        Raises:
            ValueError: It names what differs.
        """
        saved = state.get("plan") if isinstance(state, dict) else None
        if saved != self._described():
            raise ValueError(
                f"the run that saved this had the correlated noise {saved}, and this one has "
                f"{self._described()}: go on with the same correlated_noise and as many batches"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` returned, of a run with the same plan; takes over its split."""
        self.check(state)
        vars(self).update({name: state[name] for name in _STATE})
        if self.split is not None and state["split"] is not None:
            self.split.key.adopt(bytes.fromhex(state["split"]))

    def _described(self) -> dict[str, Any]:
        plan, parts = self.plan, None if self.split is None else len(self.split)
        weights = list(plan.weights)
        return {
            "weights": weights,
            "steps": plan.steps,
            "separation": plan.separation,
            "batches": parts,
        }

    def __deepcopy__(self, memo: Any) -> Correlation:
        """A copy has a key of its own, so it is another run."""
        return Correlation(self.plan)

    def __reduce__(self) -> Any:
        return Correlation, (self.plan,)


_STATE = ("charged", "_first", "_std", "_parts", "_part", "_shift")
