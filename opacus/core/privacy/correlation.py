"""Correlated noise while a run lasts: who has taken part when, and what has been paid for."""

from __future__ import annotations

import math
from typing import Any, Protocol

from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.core.privacy.filtered import Buffers
from opacus.core.privacy.key import RunKey


class Split(Protocol):
    """The parts that the data were split into: what draws batches.

    Attributes:
        latest: Number of the latest step's part, told where parts take turns.
    """

    latest: int

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
        buffers: What is held of earlier steps' noise; ``None`` where the plan holds nothing.
        spread: Deviation of the latest step's noise relative to that of its own draws.
    """

    def __init__(self, plan: CorrelatedNoise, split: Split | None = None) -> None:
        self.plan, self.split = plan, split
        self.buffers = Buffers(plan) if plan.buffers or plan.strategy else None
        self.spread = 1.0
        self._paid = -math.inf  # steps of smaller numbers are counted
        self._first: int | None = None  # number of the first step
        self._std: float | None = None  # of the white draws
        self._parts: str | None = None  # names the split that the first step was of
        self._part, self._shift = -1, -math.inf  # of the latest batch

    def rate(self, number: int, sample_rate: float) -> float:
        """At which rate a step counts: at 0 if the accountant knows of it.

        Steps of which a sample takes part in one alone count as one: all of them, or one of each
        group of the data.

        Args:
            number: Of the step.
            sample_rate: Probability of one sample being in one batch.
        """
        return 0.0 if number < self._paid else self.plan.accounted(sample_rate)[0]

    def pay(self, number: int) -> None:
        """The step of this number has been counted."""
        if number >= self._paid:
            groups = self.plan.groups
            self._paid = math.inf if groups is None else number + groups

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
                "taken part too recently: with correlated noise there must be "
                f"{self.plan.separation} steps in between. Take a step with every batch of the "
                "private loader, in its order, go through whole passes, and do not change its "
                "batches"
            )
        self._parts, self._part, self._shift = parts, part, shift
        self._tell_split()

    def _tell_split(self) -> None:
        """Groups of the data take turns, from where the latest step was."""
        if self.plan.groups is not None and self.split is not None:
            self.split.latest = self._part

    def past(self, number: int, std: float) -> list[tuple[float, int]]:
        """Weights and numbers of the earlier steps whose draws are made again for a step's noise.

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
        self.spread = self.plan.spreads[number - first]
        weights = self.plan.weights[1 : number - first + 1]
        return [(w, number - age) for age, w in enumerate(weights, start=1) if w]

    @property
    def first(self) -> int:
        """Number of the first step."""
        assert self._first is not None
        return self._first

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
        if self.buffers is not None:
            self.buffers.clear()
        if self.split is not None and state["split"] is not None:
            self.split.key.adopt(bytes.fromhex(state["split"]))
        self._tell_split()

    def _described(self) -> dict[str, Any]:
        plan, parts = self.plan, None if self.split is None else len(self.split)
        described: dict[str, Any] = {
            "weights": list(plan.weights),
            "steps": plan.steps,
            "separation": plan.separation,
            "batches": parts,
        }
        if plan.buffers:
            described["buffers"] = [list(pair) for pair in plan.buffers]
        if plan.strategy:
            described["strategy"] = list(plan.strategy)
        return described

    def __deepcopy__(self, memo: Any) -> Correlation:
        """A copy has a key of its own, so it is another run."""
        return Correlation(self.plan)

    def __reduce__(self) -> Any:
        return Correlation, (self.plan,)


_STATE = ("_paid", "_first", "_std", "_parts", "_part", "_shift")
