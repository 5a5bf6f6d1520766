"""Stores per-sample gradients in float8, where that is asked for."""

from __future__ import annotations

from torch import Tensor

from opacus.core.kernels.sums.float8 import Rounded, rounded
from opacus.core.platform.sizes import ROUNDED_ELEMENTS
from opacus.core.privacy.key import ROUNDING, RunKey


class Rounding:
    """Rounds the gradients of one backward pass after the other.

    Privacy does not rest on its random numbers: norms are of what is stored. They make rounding
    right on average. Each process has its own, for its own units.

    Args:
        stream: Name of the process, other for each that has the same seed.
    """

    def __init__(self, stream: str = "") -> None:
        self._key = RunKey()
        self._stream = stream
        self._number = 0

    def start(self) -> None:
        """A backward pass begins."""
        self._number = self._key.advance(ROUNDING)

    def __call__(self, owner: str, grads: Tensor) -> Rounded | None:
        """``grads`` ``[B, *shape]`` of a parameter in float8; ``None`` if they stay as they are."""
        if grads.numel() < ROUNDED_ELEMENTS * len(grads):
            return None
        key = self._key.stream(ROUNDING, f"{self._stream}/{owner}")
        return rounded(grads, key, self._number)
