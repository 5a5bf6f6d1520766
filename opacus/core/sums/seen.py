"""Recognises records: a replay must show what was measured.

Note [What is compared]
    The norm of each row of the backprops, and of the activations where a checkpoint
    computed them in the backward pass (others are the same memory in both passes, which autograd's
    version counters guard). Other random numbers, a changed buffer or a branch that is not
    deterministic change them. Kernels whose order of summation varies change them a little:
    within :data:`TOLERANCE` rows are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import wide_dtype
from opacus.core.platform.sharded import local_of
from opacus.core.record.record import Record

# Relative difference of norms up to which rows count as equal.
TOLERANCE = {torch.float64: 5e-7, torch.float32: 5e-4}
TOLERANCE_OF_HALF = 1e-2


class Sight(NamedTuple):
    """The fingerprint of one record.

    Attributes:
        layer: Of the record.
        norms: ``[rows]`` norms of its tensors.
        tolerance: Relative difference that is ignored.
    """

    layer: str
    norms: list[Tensor]
    tolerance: float


class Seen:
    """Fingerprints of each use of each layer in a backward pass and in its replay.

    Args:
        all_tensors: Whether the replay computes activations anew, of layers in no checkpoint too.
    """

    def __init__(self, all_tensors: bool = False) -> None:
        self._all = all_tensors
        self._measured: dict[str, list[Sight]] = {}
        self._replayed: dict[str, list[Sight]] = {}

    def measured(self, record: Record) -> None:
        """A record of the pass that measures."""
        _note(self._measured, record, self._all)

    def replayed(self, record: Record) -> None:
        """A record of the replay."""
        _note(self._replayed, record, self._all)

    def differs(self) -> Tensor | None:
        """Whether any row differs, on the device; ``None`` if nothing was replayed."""
        pairs = [pair for name, now in self._replayed.items() for pair in self._pairs(name, now)]
        if not pairs:
            return None
        shapes = all(len(a) == len(b) for a, b, _ in pairs)
        if not shapes:
            return torch.ones((), dtype=torch.bool, device=pairs[0][0].device)
        before = torch.cat([a for a, _, _ in pairs])
        after = torch.cat([b for _, b, _ in pairs])
        limit = max(tolerance for _, _, tolerance in pairs)
        return ~torch.isclose(after, before, rtol=limit, atol=0.0, equal_nan=True).all()

    def first_that_differs(self) -> str:
        """The name of a layer whose rows differ; looks at the device's memory."""
        for name, now in self._replayed.items():
            for before, after, limit in self._pairs(name, now):
                same = len(before) == len(after) and bool(
                    torch.isclose(after, before, rtol=limit, atol=0.0, equal_nan=True).all()
                )
                if not same:
                    return name
        return next(iter(self._replayed))

    def _pairs(self, name: str, now: list[Sight]) -> list[tuple[Tensor, Tensor, float]]:
        """Norms then and now of one layer, use after use."""
        before = self._measured.get(name, [])
        if len(before) != len(now):
            empty = now[0].norms[0]
            return [(empty[:0], torch.cat([empty, empty.new_ones(1)]), 0.0)]
        return [
            (a, b, sight.tolerance)
            for known, sight in zip(before, now, strict=True)
            # A use outside of a checkpoint may have come before one inside was computed again.
            for a, b in zip(known.norms, sight.norms, strict=False)
        ]


def _note(sights: dict[str, list[Sight]], record: Record, everything: bool) -> None:
    first = record.backprops[0] if isinstance(record.backprops, tuple) else record.backprops
    limit = TOLERANCE.get(first.dtype, TOLERANCE_OF_HALF)
    name = record.spec.name
    sights.setdefault(name, []).append(Sight(name, _norms(record, everything), limit))


REPLAY_ADVICE = (
    "Other random numbers (a checkpoint with preserve_rng_state=False), a buffer that was changed "
    "in between, or an operation that is not deterministic do that. Use preserve_rng_state=True, "
    "or a mode with _bk at its end, which runs backward once"
)


BLOCK_ADVICE = (
    "Its block is run again because held_budget or memory_budget leaves no room for its records: "
    "set None, or take out what differs (a cache, a buffer that is changed in forward, random "
    "numbers of a generator of its own)"
)


def described(layer: str) -> str:
    """The start of the message about a layer whose replay is not what was measured."""
    return (
        f"layer '{layer}' computed something else when the backward pass was run again for the "
        "clipped sum than when its norms were measured"
    )


def compared(seen: Seen, advice: str) -> Tensor | None:
    """Whether a replay differs, on a GPU; ``None`` on a CPU, where it does not.

    Args:
        seen: Both runs.
        advice: What to do about it.

    Raises:
        RuntimeError: On a CPU, if it does; names the layer.
    """
    differs = seen.differs()
    if differs is None or differs.is_cuda:
        return differs
    if bool(differs):
        raise RuntimeError(f"{described(seen.first_that_differs())}. {advice}")
    return None


def _norms(record: Record, everything: bool) -> list[Tensor]:
    """``[rows]`` norms of each tensor of the record that may have changed, backprops first."""
    backprops = record.backprops
    tensors = list(backprops) if isinstance(backprops, tuple) else [backprops]
    if record.recomputed or everything:
        tensors += record.tensors[: -len(tensors)]
    return [_row_norms(t, record.batch) for t in tensors if t.dim()]


def _row_norms(tensor: Any, rows: int) -> Tensor:
    """``[rows]``; of this rank's part of a tensor that is split over ranks."""
    local: Tensor = local_of(tensor)
    if not local.is_floating_point():
        local = local.float()  # indices
    whole = len(local) != rows  # split along the samples
    if local.dim() == 1:
        local = local[:, None]
    dims = range(0 if whole else 1, local.dim())
    norms = torch.linalg.vector_norm(local, dim=tuple(dims), dtype=wide_dtype(local))
    return norms.expand(rows) if whole else norms
