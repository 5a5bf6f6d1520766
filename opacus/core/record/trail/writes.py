"""Operations that write elements of one tensor to places of another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from opacus.core.record.trail.labels import (
    ConflictError,
    Labels,
    Lost,
    State,
    agree,
    compact,
    expanded,
    lifted,
    same_device,
    varies,
)  # fmt: skip
from opacus.core.record.trail.memory import FULL_ELEMENTS, TOO_LARGE
from opacus.core.record.trail.moves import by_dimension
from opacus.core.record.trail.op import EndedError, Handler, Op
from opacus.core.record.trail.placed import each_row_takes_its_part, in_order

NONE = torch.iinfo(torch.int64).max


def _index_put(op: Op) -> State:
    indices = by_dimension(op["indices"], op["self"].dim())
    dims = [d for d, i in enumerate(indices) if i is not None]

    def places(line: Tensor) -> Tensor:
        *some, line = same_device([*(i for i in indices if i is not None), line])
        by_dim = dict(zip(dims, some, strict=True))
        return torch.ops.aten.index.Tensor(line, [by_dim.get(d) for d in range(line.dim())])

    given = [i for i in op["indices"] if i is not None]
    return _put(op, op["values"], dims, places, adds=bool(op["accumulate"]), indices=given)


def _put_at(op: Op) -> State:
    """To places in the whole tensor, as one line."""

    def places(line: Tensor) -> Tensor:
        index, line = same_device([op["index"], line])
        return line.take(index)

    dims = range(op["self"].dim())
    adds = bool(op["accumulate"])
    return _put(op, op["source"], dims, places, adds=adds, indices=[op["index"]])


def _index_add(op: Op) -> State:
    return _along(op, op["source"], adds=True)


def _index_copy(op: Op) -> State:
    return _along(op, op["source"], adds=False)


def _embedding_bag(op: Op) -> Sequence[State]:
    """Sums of table rows: lookups in one line, and where each bag of them starts."""
    if op.state(op["weight"]) is not None:
        raise EndedError(Lost("a table that depends on samples"))
    given = (op["indices"], op["per_sample_weights"])
    parts = [op.known(t) for t in given if t is not None]
    known = [part for part in parts if part is not None]
    if not known:
        return [None]
    labels, starts = agree(known), op["offsets"]
    lookups = torch.arange(len(op["indices"]), device=starts.device)
    bags = torch.bucketize(lookups, starts[: len(op.out)], right=True) - 1
    bags, ids = same_device([bags, labels.ids.expand(len(lookups))])
    ids = _added(ids.new_full((len(op.out),), -1), bags, ids, [labels])
    return [Labels(compact(ids[:, None]), labels.assumed, labels.moved or op.tracked(starts))]


def _along(op: Op, source: Tensor, *, adds: bool) -> State:
    """``index_add`` and ``index_copy``: rows to the rows that an index names."""
    dim, index = op.dim(), op["index"]

    def places(line: Tensor) -> Tensor:
        index_here, line = same_device([index, line])
        return line.index_select(dim, index_here)

    return _put(op, source, [dim], places, adds=adds, indices=[index])


def _scatter(op: Op) -> State:
    dim, index, source = op.dim(), op["index"], op.get("src")
    if not isinstance(source, Tensor):
        return op.known(op["self"])  # constants
    thin = [d for d in range(index.dim()) if index.stride(d) == 0 and d != dim]

    def places(line: Tensor) -> Tensor:
        here = index
        for d in thin:
            if line.shape[d] == 1 and here.shape[d] > 1:
                here = here.narrow(d, 0, 1)
        here, line = same_device([here, line])
        return line.gather(dim, here)

    adds = op.name != "scatter" or op.get("reduce") is not None
    dims = [d for d in range(index.dim()) if d not in thin]
    return _put(op, source, dims, places, adds=adds, indices=[index], part=index.shape)


def _masked_scatter(op: Op) -> State:
    """Elements of the source, one after the other, to where the mask is true.

    As pictures come into a text. If no gradient will flow to them, whose they are is of no matter.
    """
    target, source = op["self"], op["source"]
    before, written = _both(op, source)
    if written is None or (before is not None and not (source.requires_grad or op.hidden)):
        return op.state(target)
    if before is not None and not (before.moved or written.moved):
        op.placed = in_order(before, written, source.shape, op.count) and each_row_takes_its_part(
            target, op["mask"], source, op.count
        )
        if op.placed:
            return before
    ids = written.ids.new_full([1] * target.dim(), -1) if before is None else before.ids
    mask, shape = op["mask"].expand(target.shape), target.shape
    by_row = mask.stride(-1) == 0 and source.shape[-1] == shape[-1] and source.dim() > 1
    if by_row and written.ids.shape[-1] == ids.shape[-1] == 1:  # whole rows, features and all
        mask, values, shape = mask[..., :1], written.ids, (*shape[:-1], 1)
        values = values.expand(*source.shape[:-1], 1)
    else:
        values = written.ids.expand(source.shape)
    if math.prod(shape) > FULL_ELEMENTS:
        return TOO_LARGE
    whole, mask, values = same_device([ids.expand(shape), mask, values.reshape(-1)])
    moved = op.tracked(op["mask"]) or written.moved or (before is not None and before.moved)
    return Labels(compact(whole.masked_scatter(mask, values)), written.assumed, moved)


def _both(op: Op, source: Tensor) -> tuple[Labels | None, Labels | None]:
    """What a tensor that is written to was, and what the source is.

    Raises:
        EndedError: That is not known of one of them.
    """
    before, written = op.state(op["self"]), op.state(source)
    if isinstance(written, Lost):
        raise EndedError(written)
    if isinstance(before, Lost):
        if not before.unwritten:
            raise EndedError(before)
        before = None
    return before, written


def _put(
    op: Op,
    source: Tensor,
    dims: Sequence[int],
    places: Callable[[Tensor], Tensor],
    *,
    adds: bool,
    indices: Sequence[Tensor],
    part: Sequence[int] | None = None,
) -> State:
    """What a tensor is after the source's elements were written, or added, to some places.

    Args:
        op: The operation; ``self`` is the tensor.
        source: What is written.
        dims: Dimensions of the tensor of which only some entries are written to.
        places: Picks from a tensor, of the tensor's shape but for dimensions of size 1 that are
            not in ``dims``, what is written to, in the shape of the source.
        adds: Whether elements are added to those that are there.
        indices: Their values say where it is written to.
        part: How much of the source is written, if not all.
    """
    before, written = _both(op, source)
    if written is None:
        return op.state(op["self"])
    shape = op["self"].shape
    ids = written.ids.new_full([1] * len(shape), -1) if before is None else before.ids
    for wanted in (dims, range(len(shape))):
        whole = expanded(ids, shape, wanted)
        if whole.numel() > FULL_ELEMENTS:
            return TOO_LARGE
        line = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
        at = places(line)
        values = lifted(_first(written.ids, part), at.dim())
        if all(v in (1, n) for v, n in zip(values.shape, at.shape, strict=True)):
            break
    whole, at, values = same_device([whole, at, values.expand(at.shape)])
    flat, at, values = whole.reshape(-1), at.reshape(-1), values.reshape(-1)
    merged = _added(flat, at, values, (written, before)) if adds else flat.index_put((at,), values)
    result = Labels(compact(merged.view(whole.shape)), written.assumed)
    placed = any(varies(result, d) for d in dims) and any([op.tracked(i) for i in indices])
    moved = placed or written.moved or (before is not None and before.moved)
    return replace(result, moved=moved)


def _first(ids: Tensor, part: Sequence[int] | None) -> Tensor:
    for dim, size in enumerate(part or ()):
        ids = ids.narrow(dim, 0, size) if ids.shape[dim] > 1 else ids
    return ids


def _added(flat: Tensor, at: Tensor, values: Tensor, states: Sequence[State]) -> Tensor:
    highest = flat.scatter_reduce(0, at, values, "amax")
    lowest = flat.where(flat >= 0, NONE).scatter_reduce(
        0, at, values.where(values >= 0, NONE), "amin"
    )
    if bool(((highest >= 0) & (lowest != highest)).any()):
        raise ConflictError(s.assumed for s in states if isinstance(s, Labels))
    return highest


WRITES: dict[str, Handler] = {
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    "_unsafe_index_put": _index_put,
    "put": _put_at,
    "index_add": _index_add,
    "masked_scatter": _masked_scatter,
    "index_reduce": _index_add,
    "index_copy": _index_copy,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter_reduce": _scatter,
}
