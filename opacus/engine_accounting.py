"""What a privacy engine has spent."""

from __future__ import annotations

from opacus.accountants import IAccountant
from opacus.accountants.sampling import Sampling
from opacus.accountants.step_counter import StepCounter


class EngineAccounting:
    """The accountant of an engine, which can be replaced while optimizers count with it.

    Args:
        accountant: Counts the steps of all optimizers that the engine makes private.
    """

    def __init__(self, accountant: IAccountant) -> None:
        self._accountant = accountant

    @property
    def accountant(self) -> IAccountant:
        """What counts the steps of all optimizers that this engine has made private.

        Another one can be put in its place at any time. It takes over the steps counted so far:
        they are put before its own history, unless that begins with them.
        """
        return self._accountant

    @accountant.setter
    def accountant(self, value: IAccountant) -> None:
        spent = self._accountant.history
        if value is not self._accountant and value.history[: len(spent)] != spent:
            value.history = [*spent, *value.history]
        self._accountant = value

    def step_counter(self, sample_rate: float, sampling: Sampling | None = None) -> StepCounter:
        """Counts steps with the accountant that the engine has when they are taken.

        Args:
            sample_rate: Probability of one sample being in one batch.
            sampling: How the batch is drawn; ``None`` for plain Poisson sampling.
        """
        return StepCounter(lambda: self.accountant, sample_rate, sampling)

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far, by all steps of all optimizers that this engine made private.

        0 before the first step, infinity after a step without noise.

        Args:
            delta: Delta, in (0, 1), usually below 1 / size of the data set.

        Raises:
            ValueError: Delta is not in (0, 1).
        """
        return self.accountant.get_epsilon(delta)
