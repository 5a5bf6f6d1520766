"""Batches of one size, whatever was drawn: rows of nobody fill them up.

The model then sees the same shapes in each step and on each rank, as compilers and CUDA graphs
want. Rows that were added are named -1 in ``unit_ids``: they are measured for nobody and get no
weight (``make_private(privacy_unit="unit_ids", max_batch_size=...)``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from opacus.data.collate import CollateFnWithEmpty
from opacus.data.users import UserCollate, UserDataset

UNIT_IDS = "unit_ids"


class PaddedCollate:
    """Fills batches up to a fixed number of rows, and names the unit of each row.

    Tensors with one row a sample get rows of zeros. A batch that does not name its units gets a
    tensor of them, each row one of its own: ``unit_ids`` in a mapping, else as the last entry.

    Args:
        collate_fn: Knows what an empty batch looks like, so which tensors have rows.
        rows: Number of rows of each batch, at least the most that drawn items have.
        rows_of_item: Most rows of an item.
        named: Whether batches name their units already, by ``unit_ids`` or in their last entry.
        rank: Number of this rank among those with different samples, which number units apart.
    """

    def __init__(
        self,
        collate_fn: CollateFnWithEmpty,
        rows: int,
        *,
        rows_of_item: int = 1,
        named: bool = False,
        rank: int = 0,
    ) -> None:
        self.collate_fn, self.rows, self.rows_of_item = collate_fn, rows, rows_of_item
        self.named, self.rank = named, rank

    def for_items(self, items: int) -> PaddedCollate:
        """The same for batches of `items` items."""
        other = copy.copy(self)
        other.rows = items * self.rows_of_item
        return other

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate_fn(samples)
        if not self.named:
            batch = _with_units(batch, self._names(len(samples)))
        blank = self.collate_fn([])
        if not self.named:
            blank = _with_units(blank, torch.zeros(0, dtype=torch.int64, device="cpu"))
        return self._filled(batch, blank, named=False, last=True)

    def _names(self, count: int) -> Tensor:
        """Of units, apart from those of other ranks and of other parts of the logical batch."""
        part = int.from_bytes(os.urandom(4), "big")  # workers do not know which part they load
        return torch.arange(count, device="cpu") + (self.rank << 52 | part << 20)

    def _filled(self, value: Any, blank: Any, named: bool, last: bool = False) -> Any:
        if isinstance(value, Tensor):
            return self._rows(value, -1 if named else 0) if _grows(blank) else value
        if isinstance(value, Mapping):
            return {k: self._filled(v, blank[k], k == UNIT_IDS) for k, v in value.items()}
        if isinstance(value, tuple | list) and len(value) == len(blank):
            place = len(value) - 1 if last else -1
            pairs = enumerate(zip(value, blank, strict=True))
            return tuple(self._filled(v, b, at == place) for at, (v, b) in pairs)
        raise TypeError(
            f"a batch of one size is made of tensors with one row a sample, in tuples or mappings; "
            f"it cannot fill up a {type(value).__name__}: let collate_fn return tensors"
        )

    def _rows(self, value: Tensor, filler: int) -> Tensor:
        missing = self.rows - len(value)
        if missing < 0:
            raise ValueError(
                f"a batch has {len(value)} rows, and there is room for {self.rows}: a collate "
                "function must make no more rows of an item than are planned for"
            )
        return torch.cat([value, value.new_full((missing, *value.shape[1:]), filler)])


def _with_units(batch: Any, units: Tensor) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, UNIT_IDS: units}
    return (*batch, units) if isinstance(batch, tuple | list) else (batch, units)


def _grows(blank: Any) -> bool:
    return blank.dim() > 0 and len(blank) == 0


def padded(
    collate_fn: CollateFnWithEmpty, dataset: Dataset[Any], items: int, rank: int
) -> PaddedCollate:
    """Fills up to what so many items of a data set may have.

    Raises:
        ValueError: Its users may have any number of rows.
    """
    most: int | None = 1
    if isinstance(dataset, UserDataset):
        most = dataset.most_rows
    if most is None:
        raise ValueError(
            "max_batch_size needs to know the most rows of a user: UserDataset(..., most_rows=)"
        )
    named = isinstance(collate_fn.wrapped_collator_fn, UserCollate)
    return PaddedCollate(collate_fn, items * most, rows_of_item=most, named=named, rank=rank)
