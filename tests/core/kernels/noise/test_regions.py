"""A shard's element numbers are those that its elements have in the whole tensor."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from opacus.core.kernels.noise.regions import Region, regions, spans_of, whole

SHAPES = [(12, 8), (7, 5), (5,), (6, 10, 4), (3, 2, 4, 5)]


def numbers(found: list[Region]) -> list[int]:
    parts = [region.numbers(0, region.size) for region in found]
    return torch.cat(parts).tolist() if parts else []


def cut(whole_: Tensor, spans: list[tuple[int, int]]) -> list[int]:
    return whole_[tuple(slice(first, first + size) for first, size in spans)].flatten().tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks(shape: tuple[int, ...]) -> None:
    indices = torch.arange(int(np.prod(shape))).view(shape)
    choices = [[(0, n), (0, n // 2), (n // 2, n - n // 2), (1, 1), (n, 0)] for n in shape]
    for spans in itertools.product(*choices):
        found = regions(shape, spans)
        assert numbers(found) == cut(indices, spans)
        for region in found:
            middle = region.size // 2
            assert region.numbers(middle, region.size).tolist() == numbers([region])[middle:]
    assert regions(shape, [(0, n) for n in shape]) == [whole(indices.numel())]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [12, 7, 2])
def test_torch_deals_like_this(ranks: int, rows: int) -> None:
    """Rows of one axis, uneven and too few ones too."""
    indices = torch.arange(rows * 6).view(rows, 6)
    for dimension in (0, 1):
        parts, _ = Shard(dimension)._split_tensor(indices, ranks, with_padding=False)
        for rank, part in enumerate(parts):
            spans = spans_of([ranks], [rank], [Shard(dimension)], indices.shape)
            assert numbers(regions(indices.shape, spans)) == part.flatten().tolist()


def test_two_axes() -> None:
    """FSDP2 over tensor parallelism: what that has split is dealt out along the first axis."""
    indices = torch.arange(14 * 6).view(14, 6)
    cases: list[tuple[Any, Any]] = [
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
    ]
    for first, second in cases:
        seen: list[int] = []
        for data, tensor in itertools.product(range(3), range(2)):
            spans = spans_of([3, 2], [data, tensor], [first, second], indices.shape)
            seen += numbers(regions(indices.shape, spans))
        copies = 3 if first.is_replicate() else 1
        assert sorted(seen) == sorted(list(range(14 * 6)) * copies)
    # Tensor-parallel rank 1 has rows 7 to 13; its data rank 1 has the second part of those.
    spans = spans_of([3, 2], [1, 1], cases[0], indices.shape)
    assert spans == [(10, 3), (0, 6)]
