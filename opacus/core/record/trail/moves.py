"""Operations that move elements: the label is moved in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    reduced,
    reshaped,
    same_device,
    varies,
)  # fmt: skip
from opacus.core.record.trail.op import EndedError, Handler, OfOne, Op, of_main
from opacus.core.record.trail.placed import in_line


def _same(op: Op, labels: Labels) -> Labels:
    return labels


def _view(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(reshaped(labels.ids, op.main.shape, op.out.shape))


def _expand(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(lifted(labels.ids, op.out.dim()))


def _permute(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(labels.ids.permute(op["dims"]))


def _transpose(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(labels.ids.transpose(op["dim0"], op["dim1"]))


def _t(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(labels.ids.t())


def _unsqueeze(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(labels.ids.unsqueeze(op["dim"]))


def _squeeze(op: Op, labels: Labels) -> Labels:
    gone = {d for d in op.dims() if op.main.shape[d] == 1}
    sizes = [n for d, n in enumerate(labels.ids.shape) if d not in gone]
    return labels.with_ids(labels.ids.reshape(sizes))


def _select(op: Op, labels: Labels) -> Labels:
    dim = op.dim()
    op.picked = varies(labels, dim)
    return labels.with_ids(labels.ids.select(dim, op["index"] if op.picked else 0))


def _slice(op: Op, labels: Labels) -> Labels:
    dim = op.dim()
    if not varies(labels, dim):
        return labels
    op.picked = op.out.shape[dim] < op.main.shape[dim]
    part = torch.ops.aten.slice.Tensor(labels.ids, dim, op["start"], op["end"], op["step"])
    return labels.with_ids(compact(part))


def _split(op: Op, labels: Labels) -> Sequence[State]:
    dim, ids = op.dim(), labels.ids
    if not varies(labels, dim):
        return [labels] * len(op.result)
    op.picked = True
    parts = ids.split([r.shape[dim] for r in op.result], dim)
    return [labels.with_ids(compact(part)) for part in parts]


def _unbind(op: Op, labels: Labels) -> Sequence[State]:
    dim = op.dim()
    last = labels.ids.shape[dim] - 1
    parts = [labels.ids.select(dim, min(i, last)) for i in range(len(op.result))]
    return [labels.with_ids(compact(part)) for part in parts]


def _diagonal(op: Op, labels: Labels) -> Labels:
    dims = (op["dim1"], op["dim2"])
    ids = expanded(labels.ids, op.main.shape, [d % op.main.dim() for d in dims])
    return labels.with_ids(compact(ids.diagonal(op["offset"], *dims)))


def _unfold(op: Op, labels: Labels) -> Labels:
    dim = int(op["dimension"]) % max(1, op.main.dim())
    if not varies(labels, dim):
        return labels.with_ids(labels.ids.unsqueeze(-1))
    op.picked = True
    return labels.with_ids(compact(labels.ids.unfold(dim, op["size"], op["step"])))


def _flip(op: Op, labels: Labels) -> Labels:
    dims = [d for d in op.dims("dims") if varies(labels, d)]
    op.picked = bool(dims)
    return labels.with_ids(labels.ids.flip(dims)) if dims else labels


def _roll(op: Op, labels: Labels) -> Labels:
    if not op["dims"]:
        flat = reshaped(labels.ids, op.main.shape, [op.main.numel()])
        if flat.numel() == 1:
            return labels
        op.picked = True
        ids = flat.expand(op.main.numel()).roll(op["shifts"]).view(op.main.shape)
        return labels.with_ids(compact(ids))
    pairs = [(s, d) for s, d in zip(op["shifts"], op.dims("dims"), strict=True)]
    pairs = [(s, d) for s, d in pairs if varies(labels, d)]
    if not pairs:
        return labels
    op.picked = True
    return labels.with_ids(labels.ids.roll([s for s, _ in pairs], [d for _, d in pairs]))


def _repeat(op: Op, labels: Labels) -> Labels:
    times = op["repeats"]
    ids = lifted(labels.ids, len(times))
    return labels.with_ids(
        ids.repeat([t if n > 1 else 1 for t, n in zip(times, ids.shape, strict=True)])
    )


def _pad(op: Op, labels: Labels) -> Labels:
    ids, pad = labels.ids, op["pad"]
    amounts: list[int] = []
    for back in range(len(pad) // 2):
        pair = pad[2 * back : 2 * back + 2]
        # Constants among one unit's elements are that unit's.
        amounts += pair if ids.shape[-1 - back] > 1 else [0, 0]
    if not any(amounts):
        return labels
    return labels.with_ids(compact(torch.constant_pad_nd(ids, amounts, -1)))


def _as_complex(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(reduced(labels, [op.main.dim() - 1]).ids.squeeze(-1))


def _as_real(op: Op, labels: Labels) -> Labels:
    return labels.with_ids(labels.ids.unsqueeze(-1))


# --- several tensors ---


def _cat(op: Op) -> State:
    tensors: list[Tensor] = op["tensors"]
    tensors = [t for t in tensors if t.dim() == op.out.dim()]  # torch skips empty vectors
    tensors = [t for t in tensors if t.numel()] or tensors
    return _joined(op, tensors, int(op["dim"]) % max(1, op.out.dim()), stacked=False)


def _stack(op: Op) -> State:
    return _joined(op, op["tensors"], int(op["dim"]) % op.out.dim(), stacked=True)


def _joined(op: Op, tensors: Sequence[Tensor], dim: int, *, stacked: bool) -> State:
    states = [op.state(t) for t in tensors]
    lost = next((s for s in states if isinstance(s, Lost)), None)
    if lost is not None:
        raise EndedError(lost)
    known = [s for s in states if isinstance(s, Labels)]
    if not known:
        return None
    if stacked:
        known = [s.with_ids(s.ids.unsqueeze(dim)) for s in known]
    if not any(varies(s, dim) for s in known):
        try:
            return agree(known)  # what is nobody's is theirs beside which it stands
        except ConflictError:
            op.joined = in_line(tensors)  # in an order that the program may have chosen
            op.picked = not op.joined
    sizes = [max(s.ids.shape[d] for s in known) for d in range(known[0].ids.dim())]
    fresh = iter(known)
    parts = []
    for tensor, state in zip(tensors, states, strict=True):
        nobody = known[0].ids.new_full((1,) * len(sizes), -1)
        ids = nobody if state is None else next(fresh).ids
        sizes[dim] = 1 if stacked else tensor.shape[dim]
        parts.append(ids.expand(sizes))
    assumed = next((s.assumed for s in known if s.assumed is not None), None)
    ids = compact(torch.cat(same_device(parts), dim))
    return Labels(ids, assumed, any(s.moved for s in known))


# --- by indices ---


def _index_select(op: Op) -> State:
    labels, dim, index = op.known(op["self"]), op.dim(), op["index"]
    if labels is None or not varies(labels, dim):
        return labels and _chosen_alone(op, labels, index)
    ids, index = same_device([labels.ids, index])
    moved = labels.moved or op.tracked(op["index"])
    return Labels(compact(ids.index_select(dim, index)), labels.assumed, moved)


def _chosen_alone(op: Op, labels: Labels, index: Tensor | None) -> Labels:
    """``labels``, of which elements of each unit are picked that no other unit has a say in.

    Raises:
        EndedError: Several have.
    """
    state = None if index is None else op.state(index)
    if isinstance(state, Lost) and state.mixed:
        raise EndedError(state)
    return labels


def _index(op: Op) -> State:
    labels = op.known(op["self"])
    if labels is None:
        return None
    indices = by_dimension(op["indices"], op["self"].dim())
    dims = [d for d, i in enumerate(indices) if i is not None]
    for index, own in _covered(op):
        if not any(varies(labels, d) for d in own):
            _chosen_alone(op, labels, index)
    ids = expanded(labels.ids, op["self"].shape, dims)
    ids, *some = same_device([ids, *(i for i in indices if i is not None)])
    places = dict(zip(dims, some, strict=True))
    result = torch.ops.aten.index.Tensor(ids, [places.get(d) for d in range(ids.dim())])
    vary = any(varies(labels, d) for d in dims)
    moved = labels.moved or (vary and _depends(op, labels))
    return Labels(compact(result), labels.assumed, moved)


def _depends(op: Op, labels: Labels) -> bool:
    """Whether values say which units are picked."""
    return any(
        any(varies(labels, d) for d in own) and op.tracked(index) for index, own in _covered(op)
    )


def _covered(op: Op) -> Iterator[tuple[Tensor | None, range]]:
    """Each index, and the dimensions that it is for."""
    dim = 0
    for index in op["indices"]:
        covered = index.dim() if index is not None and not is_integer(index) else 1
        yield index, range(dim, dim + covered)
        dim += covered


def is_integer(index: Tensor) -> bool:
    """Whether an index holds positions, and is no mask."""
    return index.dtype not in (torch.bool, torch.uint8)


def by_dimension(indices: Sequence[Tensor | None], dims: int) -> list[Tensor | None]:
    """Indices as positions in each dimension, ``None`` where all are taken."""
    found: list[Tensor | None] = []
    for index in indices:
        mask = index is not None and not is_integer(index)
        found += index.nonzero().unbind(1) if mask and index is not None else [index]
    return found + [None] * (dims - len(found))


def _gather(op: Op) -> State:
    x, dim, index = op["self"], op.dim(), op["index"]
    labels = op.known(x)
    if labels is None or x.dim() == 0:
        return labels
    ids = labels.ids
    for d, size in enumerate(index.shape):
        if d != dim and ids.shape[d] > 1:
            ids = ids.narrow(d, 0, size)
    if not varies(labels, dim):
        chosen = op.state(index)
        parts = [labels.with_ids(ids), *([chosen] if isinstance(chosen, Labels) else [])]
        return _chosen_alone(op, labels, index).with_ids(compact(agree(parts).ids))
    index = _thin(index, [d for d in range(x.dim()) if d != dim and ids.shape[d] == 1])
    ids, index = same_device([ids, index])
    sizes = [ids.shape[d] if d == dim else n for d, n in enumerate(index.shape)]
    moved = labels.moved or op.tracked(op["index"])
    return Labels(compact(ids.expand(sizes).gather(dim, index)), labels.assumed, moved)


def _thin(index: Tensor, dims: Sequence[int]) -> Tensor:
    """An index of size 1 in those of some dimensions along which it was expanded."""
    for dim in dims:
        if index.shape[dim] > 1 and index.stride(dim) == 0:
            index = index.narrow(dim, 0, 1)
    return index


def _sorted(op: Op, labels: Labels) -> Labels | Sequence[State]:
    """``sort`` and ``topk``: values and where they were."""
    if op.main.dim() == 0 or not varies(labels, op.dim()):
        return labels
    indices = op.result[1]
    ids, places = same_device([labels.ids, indices])
    sizes = [ids.shape[d] if d == op.dim() else n for d, n in enumerate(places.shape)]
    moved = Labels(compact(ids.expand(sizes).gather(op.dim(), places)), labels.assumed, True)
    return [moved, Lost("an order of several samples", mixed=True)]


def _masked_select(op: Op) -> State:
    labels = op.known(op["self"])
    if labels is None or labels.ids.numel() == 1:
        return None if labels is None else labels.with_ids(labels.ids.reshape(1))
    shape = torch.broadcast_shapes(op["self"].shape, op["mask"].shape)
    ids, mask = same_device([labels.ids, op["mask"]])
    ids = ids.expand(shape).masked_select(mask)
    return Labels(compact(ids), labels.assumed, labels.moved or op.tracked(op["mask"]))


def _embedding(op: Op) -> State:
    if op.known(op["weight"]) is not None:
        return Lost("a table that depends on samples")
    labels = op.known(op["indices"])
    return None if labels is None else labels.with_ids(labels.ids.unsqueeze(-1))


def _copied(op: Op) -> State:
    """``copy_``: the source's, in the shape of what it is copied to."""
    source: Tensor = op["src"]
    labels = op.known(source)
    return None if labels is None else labels.with_ids(lifted(labels.ids, op["self"].dim()))


_OF_MAIN: dict[str, OfOne] = {
    "alias clone detach detach_copy _to_copy to lift lift_fresh lift_fresh_copy contiguous "
    "tril triu _conj conj resolve_conj resolve_neg set_data": _same,
    "view _unsafe_view reshape _reshape_alias view_copy flatten unflatten": _view,
    "expand expand_copy": _expand,
    "permute": _permute,
    "transpose swapaxes": _transpose,
    "t": _t,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "slice": _slice,
    "split split_with_sizes unsafe_split unsafe_split_with_sizes": _split,
    "unbind": _unbind,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "flip": _flip,
    "roll": _roll,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
    "sort topk": _sorted,
}
MOVES: dict[str, Handler] = {
    **{name: of_main(f) for names, f in _OF_MAIN.items() for name in names.split()},
    "cat": _cat,
    "stack": _stack,
    "index_select": _index_select,
    "index": _index,
    "gather": _gather,
    "masked_select": _masked_select,
    "embedding": _embedding,
    "copy": _copied,
}
