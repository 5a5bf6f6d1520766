"""Units that the user names: all rows of one are in one physical batch of a step.

A physical batch is clipped by itself. A unit with rows in two of a step would be clipped twice,
each time a part of it, so that it counts more than once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class UnitNames:
    """The units of a step's physical batches, as the user names them: each is in one of them."""

    def __init__(self) -> None:
        self._latest: dict[int, Tensor] = {}  # since the latest call of check, by their place
        self._earlier: set[int] = set()  # of the step before that

    def note(self, units: Tensor) -> None:
        """A backward pass has come to rows of these units ``[n]``.

        That, not the forward pass, puts them in a step: ``zero_grad()`` may come between them.
        """
        self._latest[id(units)] = units

    def check(self, final: bool) -> None:
        """A physical batch of a step is complete.

        Args:
            final: Whether it is the last one.

        Raises:
            RuntimeError: Units have rows in several: each part would be clipped by itself.
        """
        if self._latest and not (final and not self._earlier):  # not the only batch of its step
            latest = torch.cat([units.reshape(-1).cpu() for units in self._latest.values()])
            names = set(latest.tolist())
            self._refuse(sorted(names & self._earlier))
            self._earlier |= names
        self._latest.clear()
        if final:
            self.forget()

    def _refuse(self, twice: list[int]) -> None:
        if twice:
            raise RuntimeError(
                f"several physical batches of one step have rows of the units {twice[:5]}, of "
                "which each would clip its own part only, so that a unit counts more than once: "
                "let an item of the data set be a unit with all its rows "
                "(opacus.data.users.UserDataset), as sampling and accounting assume"
            )

    def forget(self) -> None:
        """The step is not finished: what it has seen is dropped."""
        self._latest.clear()
        self._earlier.clear()
