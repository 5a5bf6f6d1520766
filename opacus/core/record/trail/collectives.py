"""Operations between ranks that hold parts of the same samples' tensors (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opacus.core.record.trail.labels import Labels, Lost, State, compact, expanded, varies
from opacus.core.record.trail.op import Handler, Op, of_main

_SPLIT = Lost("the ranks hold different samples' rows of a tensor")


def of_part(labels: Labels, whole: torch.Size, part: torch.Size) -> State:
    """The label of a tensor ``whole`` that is split over ranks, of this rank's ``part``."""
    split = [d for d, (n, own) in enumerate(zip(whole, part, strict=True)) if n != own]
    if any(varies(labels, d) for d in split):
        return Lost("the samples' rows are split over ranks")
    return labels


def _same(op: Op, labels: Labels) -> Labels:
    return labels


def _all_gather(op: Op, labels: Labels) -> Labels | Sequence[State]:
    """The ranks' tensors one behind another: all alike, if each has rows of all samples."""
    if not varies(labels, 0):
        return labels
    ids = expanded(labels.ids, op.main.shape, [0])
    if len(ids[ids >= 0].unique()) < op.count:
        return [_SPLIT]
    return labels.with_ids(ids.repeat(op["group_size"], *[1] * (ids.dim() - 1)))


def _reduce_scatter(op: Op, labels: Labels) -> Labels | Sequence[State]:
    """A part of the first dimension on each rank: any of them, if all are alike."""
    if not varies(labels, 0):
        return labels
    ids = expanded(labels.ids, op.main.shape, [0])
    parts = ids.unflatten(0, (op["group_size"], -1))
    if not bool((parts == parts[:1]).all()):
        return [_SPLIT]
    return labels.with_ids(compact(parts[0]))


def _all_to_all(op: Op, labels: Labels) -> Labels | Sequence[State]:
    """Split along another dimension than before."""
    dims = (op.dim("gather_dim"), op.dim("shard_dim"))
    return [_SPLIT] if any(varies(labels, dim) for dim in dims) else labels


COLLECTIVES: dict[str, Handler] = {
    "_c10d_functional::all_reduce": of_main(_same),
    "_c10d_functional::wait_tensor": of_main(_same),
    "_c10d_functional::all_gather_into_tensor": of_main(_all_gather),
    "_c10d_functional::reduce_scatter_tensor": of_main(_reduce_scatter),
    "_dtensor::shard_dim_alltoall": of_main(_all_to_all),
}
