"""Labels: the unit of each element of a tensor, and rules for arithmetic on them.

A *label* is an int64 tensor with as many dimensions as the tensor that it is of: the unit of each
element, -1 for nobody's. Dimensions along which it does not vary have size 1, so that it costs
little: ``[B, 1, 1]`` for ``[B, T, d]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opacus.core.rules.spec import LayerSpec


@dataclass(frozen=True, eq=False)
class Labels:
    """The units of a tensor's elements.

    Attributes:
        ids: The label.
        assumed: The layer whose output was taken to have units in its rows, though nothing
            showed it, if the label comes from there.
        moved: Whether it depends on values (a sort, a mask, a router), not on shapes alone.
    """

    ids: Tensor
    assumed: LayerSpec | None = None
    moved: bool = False

    def with_ids(self, ids: Tensor) -> Labels:
        """Other elements, from the same source."""
        return self if ids is self.ids else replace(self, ids=ids)


@dataclass(frozen=True, eq=False)
class Lost:
    """The units of the elements are unknown.

    Attributes:
        reason: What ended the trail, in words.
        mixed: Whether elements are known to be made of several units.
        unwritten: Memory that nothing has been written to yet: whose it is, the first write says.
    """

    reason: str
    mixed: bool = False
    unwritten: bool = False


# None: nobody's. Parameters, buffers, zeros, positions: the same whatever the units are.
State = Labels | Lost | None


class NobodysRowsError(ValueError):
    """A layer's rows were computed from no input: they must get no gradient."""


class ConflictError(Exception):
    """Elements of several units meet in one; ``layers`` are those whose rows were assumed."""

    def __init__(self, layers: Iterable[LayerSpec | None] = ()) -> None:
        super().__init__()
        self.layers = [layer for layer in layers if layer is not None]


def same_labels(one: Tensor, other: Tensor) -> bool:
    """Whether two labels of one shape say the same, on whichever devices they lie."""
    return bool(torch.equal(*torch.broadcast_tensors(one, other.to(one.device))))


def compact(ids: Tensor) -> Tensor:
    """``ids`` with size 1 in each dimension along which it does not vary."""
    for dim in range(ids.dim()):
        if ids.shape[dim] > 1:
            first = ids.narrow(dim, 0, 1)
            if ids.stride(dim) == 0 or torch.equal(ids, first.expand_as(ids)):
                ids = first
    return ids


def expanded(ids: Tensor, shape: Sequence[int], dims: Iterable[int]) -> Tensor:
    """``ids`` in the full size of ``shape`` in some dimensions, without memory."""
    wanted = set(dims)
    return ids.expand([n if d in wanted else ids.shape[d] for d, n in enumerate(shape)])


def lifted(ids: Tensor, dims: int) -> Tensor:
    """``ids`` with dimensions in front, up to ``dims``, as broadcasting adds them."""
    return ids.reshape(*[1] * (dims - ids.dim()), *ids.shape)


def same_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All on the accelerator, if one of them is."""
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return [t.to(device) for t in tensors]


def varies(labels: Labels, dim: int) -> bool:
    """Whether there are several units along a dimension."""
    return labels.ids.shape[dim] > 1


def agree(parts: Sequence[Labels]) -> Labels:
    """What elements are that are computed from one of each of ``parts``, broadcast.

    Raises:
        ConflictError: They are of several units.
    """
    first = parts[0]
    for other in parts[1:]:
        first = _agree(first, other)
    return first


def _agree(a: Labels, b: Labels) -> Labels:
    moved = a.moved or b.moved
    # What was assumed is confirmed by what is known.
    assumed = a.assumed if a.assumed is not None and b.assumed is not None else None
    ids = _agreed(a.ids, b.ids)
    if ids is None:
        raise ConflictError((a.assumed, b.assumed))
    if ids is a.ids and (a.assumed, a.moved) == (assumed, moved):
        return a
    return Labels(ids, assumed, moved)


def _agreed(a: Tensor, b: Tensor) -> Tensor | None:
    dims = max(a.dim(), b.dim())
    a, b = lifted(a, dims), lifted(b, dims)
    if a is b or (a.shape == b.shape and torch.equal(a, b)):
        return a
    a, b = same_device([a, b])
    known = (a >= 0) & (b >= 0)
    if bool(((a != b) & known).any()):
        return None
    return compact(torch.where(a >= 0, a, b))


def reduced(labels: Labels, dims: Iterable[int]) -> Labels:
    """What is computed from all elements along some dimensions, which get size 1.

    Raises:
        ConflictError: They are of several units.
    """
    wanted = [d for d in dims if labels.ids.shape[d] > 1]
    if not wanted:
        return labels
    ids = labels.ids
    highest = ids.amax(wanted, keepdim=True)
    lowest = ids.where(ids >= 0, highest).amin(wanted, keepdim=True)
    if not torch.equal(highest, lowest):
        raise ConflictError((labels.assumed,))
    return labels.with_ids(compact(highest))


def reshaped(ids: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """The label of a tensor of shape ``old`` that is viewed in shape ``new``.

    Only dimensions that are merged or split, and along which it varies, take memory.
    """
    if math.prod(old) == 0:
        return ids.new_empty([min(n, 1) for n in new])  # of nobody, and of no rows
    sizes: list[int] = []  # of ids, as it can be reshaped at once
    result: list[int] = []
    for before, after in _groups(old, new):
        vary = any(ids.shape[d] > 1 for d in before)
        sizes += [old[d] if vary else 1 for d in before]
        result += [new[d] if vary else 1 for d in after]
    return compact(ids.expand(sizes).reshape(result))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dimensions before and after in groups of equal numbers of elements, smallest possible."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [], []
        left, right = 1, 1
        if i < len(old):
            before, left, i = [i], old[i], i + 1
        if j < len(new) and (not before or left != 1 or new[j] == 1):
            after, right, j = [j], new[j], j + 1
        while left != right:
            if left < right:
                left, before, i = left * old[i], [*before, i], i + 1
            else:
                right, after, j = right * new[j], [*after, j], j + 1
        groups.append((before, after))
    return groups


def check_single(output: Tensor, state: State) -> None:
    """Check an output of a model, of which there is a gradient.

    Raises:
        ValueError: It is made of several samples.
    """
    if isinstance(state, Lost) and state.mixed:
        raise ValueError(
            f"an output of the model, {tuple(output.shape)}, is of no single sample: "
            f"{state.reason}. A loss of it has no part that belongs to one sample"
        )
