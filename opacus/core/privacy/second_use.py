"""Batches of the private loader that are used in more than one step.

Note [A draw is for one step]
    Each step is counted as one of a fresh Poisson draw; k steps of the same draw tell as much as
    one with noise of σ / √k. A loop that keeps batches (``itertools.cycle(loader)``, or
    ``list(loader)`` for several epochs) would be counted at far too small an ε. It is known by
    steps for which the loader was not asked for a batch. Those may also be of other things, as of
    the pictures that a generator made; so what the model is given in such a step is compared with
    what was delivered, by a few numbers of each tensor.
"""

from __future__ import annotations

import logging
from typing import Any

from opacus.core.privacy.draws import Draws

logger = logging.getLogger(__name__)

USED = (
    "this batch has been used in a step before, and the data loader was not asked for another one: "
    "itertools.cycle(loader) and list(loader) keep the batches of one pass. Privacy is counted for "
    "a fresh draw in each step, and several steps of one draw tell more. Iterate over the loader "
    "itself in each pass (in a benchmark, which releases nothing: make_private(..., "
    "poisson_sampling=False))"
)


class SecondUse:
    """Whether steps of an optimizer are of batches that it has used before.

    See Note [A draw is for one step].

    Args:
        draws: Of the Poisson sampler as whose batches steps are counted.
    """

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._released: int | None = None  # batches that had been delivered at the latest step
        self._is_old = False
        self._told = False

    def look_at_inputs(self, inputs: Any) -> None:
        """The model is given these, in training."""
        if self._none_is_new() and not self._is_old:
            self._is_old = self._draws.delivered.hold(inputs)

    def check(self) -> None:
        """A step of samples is about to be taken; before its batch is taken for one that waits.

        Raises:
            RuntimeError: It is of samples that were in a step before.
        """
        is_old, self._is_old = self._is_old, False
        if not self._none_is_new():
            return
        if is_old:
            raise RuntimeError(USED)
        if not self._told:
            self._told = True
            logger.warning(
                "A step is taken for which the data loader was not asked for another batch. It is "
                "counted as a step of a fresh draw: if samples of an earlier batch are used again "
                "(changed ones, too), more is told of them than get_epsilon() says."
            )

    def released(self) -> None:
        """A step has been taken."""
        self._released = self._draws.count

    def _none_is_new(self) -> bool:
        draws = self._draws
        return draws.started and not draws.waits and draws.count == self._released
