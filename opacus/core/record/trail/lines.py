"""Operations that move elements by their places in memory, or in one line of all times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.core.record.trail.labels import (
    Labels,
    State,
    compact,
    expanded,
    lifted,
    reduced,
    same_device,
)
from opacus.core.record.trail.memory import FULL_ELEMENTS, NOT_FOLLOWED, TOO_LARGE
from opacus.core.record.trail.op import Handler, Op


def _take(op: Op) -> State:
    """By places in the whole tensor, as one line."""
    labels = op.known(op["self"])
    if labels is None or labels.ids.numel() == 1:
        return labels and labels.with_ids(lifted(labels.ids.reshape(()), op.out.dim()))
    if op["self"].numel() > FULL_ELEMENTS:
        return TOO_LARGE
    ids, index = same_device([labels.ids.expand(op["self"].shape), op["index"]])
    return Labels(compact(ids.take(index)), labels.assumed, labels.moved or op.tracked(op["index"]))


def _as_strided(op: Op) -> State:
    """Another view of the same memory, of which no more than the tensor's own is known."""
    labels, x, size, stride = op.known(op["self"]), op["self"], op["size"], op["stride"]
    if labels is None:
        return None
    first = 0 if op["storage_offset"] is None else op["storage_offset"] - x.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not size or not x.is_contiguous() or not 0 <= first <= last < x.numel():
        return NOT_FOLLOWED
    if x.numel() > FULL_ELEMENTS:
        return TOO_LARGE
    ids = labels.ids.expand(x.shape).contiguous()
    rows = first == 0 and x.dim() > 0 and (x.shape[0], x.stride(0)) == (size[0], stride[0])
    op.picked = labels.ids.numel() > 1 and not rows
    return labels.with_ids(compact(ids.as_strided(size, stride, first)))


def _packed(op: Op) -> State | Sequence[State]:
    """``[B, T, *]`` without padding, one time after the other, and back."""
    packs = op.name == "_pack_padded_sequence"
    data: Tensor = op["input" if packs else "data"]
    labels, lengths = op.known(data), op["lengths" if packs else "batch_sizes"]
    if labels is None:
        return None
    lead = 2 if packs else 1
    ids = expanded(reduced(labels, range(lead, data.dim())).ids, data.shape, range(lead)).cpu()
    if packs:
        moved = torch.ops.aten._pack_padded_sequence(ids, lengths, op["batch_first"])[0]
    else:
        length = op["total_length"]
        moved = torch._VF._pad_packed_sequence(ids, lengths, op["batch_first"], -1, length)[0]
    return [Labels(compact(moved), labels.assumed, True), None]


LINES: dict[str, Handler] = {
    "take": _take,
    "as_strided": _as_strided,
    "_pack_padded_sequence": _packed,
    "_pad_packed_sequence": _packed,
}
