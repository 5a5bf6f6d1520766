"""Recognises records: a replay must show what was measured.

Note [What is compared]
    The squared norm of each row of the backprops, and of the activations where a checkpoint
    computed them in the backward pass (others are the same memory in both passes, which autograd's
    version counters guard). Other random numbers, a changed buffer or a branch that is not
    deterministic change them. Kernels whose order of summation varies change them a little:
    within :data:`TOLERANCE` rows are the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import sum_of_squares
from opacus.core.platform.sharded import is_dtensor
from opacus.core.record.record import Record

# Relative difference of squared norms of rows that are still the same.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
TOLERANCE_OF_HALF = 2e-2


class Seen:
    """What one backward pass showed of each use of each layer, in order."""

    def __init__(self) -> None:
        self._uses: dict[str, deque[list[Tensor]]] = defaultdict(deque)

    def note(self, record: Record) -> None:
        """A record of the pass that measures."""
        self._uses[record.spec.name].append(_squares(record))

    def differs(self, record: Record) -> Tensor:
        """``[rows]`` bool: which rows of a record of the replay are not those that were measured.

        Raises:
            RuntimeError: The layer was not used so often; names it.
        """
        uses = self._uses[record.spec.name]
        if not uses:
            raise RuntimeError(f"{described(record)}: it was not used so often when measured")
        odd = torch.zeros(record.batch, dtype=torch.bool, device=record.device)
        for measured, now in zip(uses.popleft(), _squares(record), strict=True):
            if measured.shape != now.shape:
                return torch.ones_like(odd)
            tolerance = TOLERANCE.get(_dtype(record), TOLERANCE_OF_HALF)
            odd |= ~torch.isclose(now, measured, rtol=tolerance, atol=0.0, equal_nan=True)
        return odd


REPLAY_ADVICE = (
    "Other random numbers (a checkpoint with preserve_rng_state=False), a buffer that was changed "
    "in between, or an operation that is not deterministic do that. Use preserve_rng_state=True, "
    "or a mode with _bk at its end, which runs backward once"
)


def described(record: Record) -> str:
    """The start of the message about a layer whose replay is not what was measured."""
    return (
        f"{record.spec} computed something else when the backward pass was run again for the "
        "clipped sum than when its norms were measured"
    )


def _squares(record: Record) -> list[Tensor]:
    """``[rows]`` squared norms of each tensor of the record that may have changed."""
    backprops = record.backprops
    tensors = list(backprops) if isinstance(backprops, tuple) else [backprops]
    if record.recomputed:
        tensors = record.tensors
    return [_rows_squared(t, record.batch) for t in tensors if t.dim()]


def _rows_squared(tensor: Any, rows: int) -> Tensor:
    """``[rows]``; of this rank's part of a tensor that is split over ranks."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    if not local.is_floating_point():
        local = local.float()  # indices
    if len(local) == rows:
        return sum_of_squares(local)
    return sum_of_squares(local.reshape(1, -1)).expand(rows)  # split along the samples


def _dtype(record: Record) -> torch.dtype:
    first = record.backprops
    return (first[0] if isinstance(first, tuple) else first).dtype  # type: ignore[no-any-return]
