"""Which elements of a whole tensor a rank's shard has: their numbers, row after row.

Noise is a function of an element's number in the *whole* parameter, so it is the same however a
parameter lies on the ranks, and replicas of a shard get the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from opacus.core.platform.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Ways in which tensors lie on the ranks that are remembered.
MOST_KNOWN = 1 << 14
# By the place of what DTensors say of that, which takes less time than to compare it.
_KNOWN: dict[int, tuple[Any, tuple[int, ...], list[Region]]] = {}

Span = tuple[int, int]  # first index of a dimension, and how many


class Region(NamedTuple):
    """Element i is number ``first + (i // width) * pitch + i % width`` of the whole tensor.

    Attributes:
        first: Number of the first element.
        size: How many there are.
        width: Elements that follow each other without a gap.
        pitch: Distance of the beginnings of two such rows.
    """

    first: int
    size: int
    width: int
    pitch: int

    def numbers(self, start: int, end: int) -> Tensor:
        """Numbers (int64) of the elements ``start`` to ``end - 1``."""
        own = torch.arange(start, end, device="cpu")
        if self.width < self.size:
            own = own // self.width * self.pitch + own % self.width
        return own + self.first


def whole(size: int) -> Region:
    """All of a tensor of ``size`` elements."""
    return Region(0, size, size, size)


def regions_of(tensor: Tensor, local: Tensor) -> list[Region]:
    """The regions of this rank's part of ``tensor``, which follow each other in it.

    Nearly always one; none if this rank has no element.

    Args:
        tensor: A parameter, or a tensor that lies on the ranks like one.
        local: This rank's part of it.

    Raises:
        NotImplementedError: A DTensor that is split in a way other than torch's own.
    """
    if not is_dtensor(tensor):
        return [whole(tensor.numel())] if tensor.numel() else []
    spec: Any = getattr(tensor, "_spec", None)  # gradients have that of their parameter
    known = _KNOWN.get(id(spec))
    if known is not None and known[0] is spec and known[1] == local.shape:
        return known[2]
    found = _regions_of(tensor.device_mesh, tensor.placements, tensor.shape, local.shape)
    if len(_KNOWN) >= MOST_KNOWN:
        _KNOWN.clear()
    if spec is not None:
        _KNOWN[id(spec)] = spec, local.shape, found
    return found


@functools.lru_cache(maxsize=MOST_KNOWN)
def _regions_of(
    mesh: DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, ...], local: tuple[int, ...]
) -> list[Region]:
    place = mesh.get_coordinate()
    if place is None or not math.prod(local):
        return []
    spans = spans_of(mesh.shape, place, placements, shape)
    if tuple(size for _, size in spans) != tuple(local):
        raise NotImplementedError(
            f"a parameter of shape {list(shape)} with placements {placements} has a shard of shape "
            f"{list(local)} on this rank, where {[size for _, size in spans]} was expected, so its "
            "noise has no place; use fully_shard and parallelize_module to split it"
        )
    return regions(shape, spans)


def spans_of(
    ranks: Sequence[int], place: Sequence[int], placements: Sequence[Any], shape: Sequence[int]
) -> list[Span]:
    """What a rank has of each dimension.

    Args:
        ranks: Size of each axis of the mesh.
        place: This rank's coordinate along each.
        placements: Of the tensor, one for each axis.
        shape: Of the whole tensor.
    """
    spans = [(0, size) for size in shape]
    axes = range(len(placements))
    # FSDP2 shards what tensor parallelism has split, though its axis comes first: "strided".
    late = [axis for axis in axes if hasattr(placements[axis], "split_factor")]
    for axis in [axis for axis in axes if axis not in late] + late[::-1]:
        if placements[axis].is_replicate():
            continue
        dimension = placements[axis].dim
        first, size = spans[dimension]
        part = -(-size // ranks[axis])  # as torch.chunk deals: the last ones may get less
        begin, end = (min(size, part * number) for number in (place[axis], place[axis] + 1))
        spans[dimension] = (first + begin, end - begin)
    return spans


def regions(shape: Sequence[int], spans: Sequence[Span]) -> list[Region]:
    """The regions of a block of a tensor of this shape."""
    size = math.prod(count for _, count in spans)
    if not size:
        return []
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    partly = [place for place, (_, count) in enumerate(spans) if count < shape[place]]
    if not partly:
        return [whole(size)]
    last = partly[-1]
    first = sum(begin * stride for (begin, _), stride in zip(spans, strides, strict=True))
    width = spans[last][1] * strides[last]
    outer = [place for place in partly[:-1] if place < last]
    several = [place for place in range(outer[-1] if outer else 0) if spans[place][1] > 1]
    if not several:
        pitch = shape[last] * strides[last]
        return [Region(first, size, width, pitch if width < size else width)]
    # Rows at more than one distance: one of the outermost dimension at a time.
    place = several[0]
    begin, count = spans[place]
    before, after = spans[:place], spans[place + 1 :]
    rows = [[*before, (begin + row, 1), *after] for row in range(count)]
    return [region for row in rows for region in regions(shape, row)]
