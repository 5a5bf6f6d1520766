"""The labels of tensors by their memory: views see what is written to other views."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from opacus.core.record.trail.labels import (
    ConflictError,
    Labels,
    Lost,
    State,
    agree,
    compact,
    same_labels,
)

# What the values of a tensor follow from: from shapes; from what the model or the program brings
# along (buffers, lists, random numbers), so that they may be others the next time; or from the
# units' data.
SHAPES, OUTSIDE, DATA = 0, 1, 2

# Offset, shape and strides.
Place = tuple[int, torch.Size, tuple[int, ...]]
# Most elements of a tensor whose label is written out in full, where nothing smaller will do.
FULL_ELEMENTS = 1 << 26

NOT_FOLLOWED = Lost("a view that cannot be followed")
SPARSE = Lost("a sparse tensor is not followed")
TOO_LARGE = Lost("parts of a large tensor that were written one by one")


@dataclass
class _Memory:
    """One storage: whose its elements are, as seen from each view of it."""

    alive: StorageWeakRef  # as long as it is there, no other storage gets its address
    source: int = SHAPES
    views: dict[Place, State] = field(default_factory=dict)


class Memory:
    """The states of all tensors that operations have given since the trail began."""

    def __init__(self) -> None:
        self._known: dict[int, _Memory] = {}

    def state(self, tensor: Tensor) -> State:
        """The label of a tensor; nobody's if its memory is unknown."""
        try:
            key = tensor.untyped_storage()._cdata
        except NotImplementedError:  # a sparse tensor
            return None if self.state(_stored(tensor)) is None else SPARSE
        memory = self._known.get(key)
        if memory is None:
            return None
        place = _place(tensor)
        if place in memory.views:
            return memory.views[place]
        return self._derived(memory, place)

    def source(self, tensor: Tensor) -> int:
        """What a tensor's values depend on."""
        if tensor.layout is not torch.strided:
            return OUTSIDE
        memory = self._known.get(tensor.untyped_storage()._cdata)
        return OUTSIDE if memory is None else memory.source

    def put(self, tensor: Tensor, state: State, source: int = SHAPES) -> None:
        """A new tensor, or a new view of one; ``source`` is what its values follow from."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            if state is not None:
                self.put(_stored(tensor), SPARSE, source)
            return
        memory = self._known.get(storage._cdata)
        if memory is None:
            memory = self._known[storage._cdata] = _Memory(StorageWeakRef(storage))
        memory.views[_place(tensor)] = state
        memory.source = max(memory.source, source)

    def view(self, tensor: Tensor, state: State, source: int = SHAPES) -> None:
        """A view of a tensor; ``state`` as far as the tensor's says.

        Where nothing is known of that, what was written to just this part of it counts.
        """
        if isinstance(state, Lost) and tensor.layout is torch.strided:
            memory = self._known.get(tensor.untyped_storage()._cdata)
            state = state if memory is None else memory.views.get(_place(tensor), state)
        self.put(tensor, state, source)

    def write(self, tensor: Tensor, state: State, source: int = SHAPES) -> None:
        """The elements of a tensor have been changed in place, and with them those of its views."""
        if tensor.numel() == 0:
            return
        before, known = self.state(tensor), self.source(tensor)
        self.put(tensor, state, max(known, source))
        if tensor.layout is not torch.strided or before is state or _equal(before, state):
            return
        memory = self._known[tensor.untyped_storage()._cdata]
        place = _place(tensor)
        whole = max(memory.views, key=lambda p: (math.prod(p[1]), p != place))
        if math.prod(whole[1]) > math.prod(place[1]):
            memory.views = {
                whole: _written(memory.views[whole], whole, state, place),
                place: state,
            }
        else:
            memory.views = {place: state}

    def _derived(self, memory: _Memory, place: Place) -> State:
        """A view that no operation was seen to make."""
        shape = place[1]
        for other, state in memory.views.items():
            if isinstance(state, Labels):
                if _essential(other) == _essential(place):
                    varying = iter(
                        [n for n, m in zip(state.ids.shape, other[1], strict=True) if m != 1]
                    )
                    return state.with_ids(
                        state.ids.reshape([1 if n == 1 else next(varying) for n in shape])
                    )
                if all(n == 1 for n in state.ids.shape):
                    return state.with_ids(state.ids.reshape([1] * len(shape)))
        states = list(memory.views.values())
        if all(state is None for state in states):
            return None
        lost = next((s for s in states if isinstance(s, Lost)), NOT_FOLLOWED)
        return lost


def _stored(tensor: Tensor) -> Tensor:
    """The elements that a sparse tensor stores."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def _place(tensor: Tensor) -> Place:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _essential(place: Place) -> tuple[int, list[tuple[int, int]]]:
    """A place without its dimensions of size 1: they may be left out, or have any strides."""
    offset, shape, stride = place
    return offset, [(n, step) for n, step in zip(shape, stride, strict=True) if n != 1]


def _equal(a: State, b: State) -> bool:
    if not (isinstance(a, Labels) and isinstance(b, Labels)):
        return False
    same = a.ids.shape == b.ids.shape and same_labels(a.ids, b.ids)
    return same and (a.assumed, a.moved) == (b.assumed, b.moved)


def _written(whole: State, at: Place, part: State, place: Place) -> State:
    """Whose a tensor is, of which a part was written to.

    Args:
        whole: Of the tensor, before.
        at: Where it lies.
        part: What was written.
        place: Where it was written.
    """
    if part is None and (whole is None or isinstance(whole, Labels)):
        return whole  # constants among rows of units are those units'
    if isinstance(part, Lost) or (isinstance(whole, Lost) and not whole.unwritten):
        return part if isinstance(part, Lost) else whole
    if part is None:
        return whole  # unwritten memory, of which a part is constant now
    spread = _spread(part, at, place)
    if spread is not None:
        if not isinstance(whole, Labels):
            return spread
        try:
            return agree([whole, spread])
        except ConflictError:
            pass
    return _written_out(whole, at, part, place)


def _spread(part: Labels, at: Place, place: Place) -> Labels | None:
    """The label of a whole tensor that varies as that of a part does, along the same dimensions.

    ``None`` if the part has not all of a dimension along which it varies.
    """
    found: dict[int, int] = {}
    for dim, size in enumerate(part.ids.shape):
        if size == 1:
            continue
        fits = [d for d, s in enumerate(at[2]) if s == place[2][dim] and at[1][d] == size]
        if len(fits) != 1 or any(fits[0] <= d for d in found):
            return None
        found[fits[0]] = size
    return part.with_ids(part.ids.reshape([found.get(d, 1) for d in range(len(at[1]))]))


def _written_out(whole: State, at: Place, part: Labels, place: Place) -> State:
    """The label of a tensor written out in full, with that of a part in its place."""
    at, place = _without_features(whole, at, part, place)
    offset, shape, stride = at
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if extent > 2 * math.prod(shape) or place[0] < offset:
        return NOT_FOLLOWED
    if extent > FULL_ELEMENTS:
        return TOO_LARGE
    line = torch.full((extent,), -1, dtype=torch.int64, device=part.ids.device)
    if isinstance(whole, Labels):
        line.as_strided(shape, stride).copy_(whole.ids.expand(shape))
    line.as_strided(place[1], place[2], place[0] - offset).copy_(part.ids.expand(place[1]))
    moved = part.moved or (isinstance(whole, Labels) and whole.moved)
    return Labels(compact(line.as_strided(shape, stride).clone()), part.assumed, moved)


def _without_features(whole: State, at: Place, part: Labels, place: Place) -> tuple[Place, Place]:
    """Both places without last dimensions that are all in the part and in which nothing varies."""
    (offset, shape, stride), (start, size, step) = at, place
    known = whole.ids.shape if isinstance(whole, Labels) else [1] * len(shape)
    for back in range(1, min(len(shape), len(size)) + 1):
        width = shape[-back]
        alike = width == size[-back] and stride[-back] == step[-back] == 1
        constant = known[-back] == 1 and part.ids.shape[-back] == 1
        others = [*stride[: len(shape) - back], *step[: len(size) - back], start - offset]
        if not (alike and constant) or any(s % width for s in others):
            break
        shape, stride = _flat(shape, stride, back, width)
        size, step = _flat(size, step, back, width)
        offset, start = 0, (start - offset) // width
    return (offset, shape, stride), (start, size, step)


def _flat(
    shape: torch.Size, stride: tuple[int, ...], back: int, width: int
) -> tuple[torch.Size, tuple[int, ...]]:
    """Size 1 in place of ``width`` in a dimension, in a memory that is as much smaller."""
    sizes, steps = list(shape), [max(1, s // width) for s in stride]
    sizes[-back] = 1
    return torch.Size(sizes), tuple(steps)
