"""Batches of no samples: the structure of a real batch, and nothing of its content.

The structure is read off two batches of one and of two samples. What differs between them depends
on the batch, what does not is part of the structure:

    value                                  in the blank batch
    tensor or array whose shape differs    no samples: size 0 in the batch dimension
    tensor or array whose shape does not   the same shape, zeros
    list or tuple whose length differs     empty: it holds one entry a sample
    list, tuple, mapping, dataclass        the same type, its entries blanked
    str, bytes, int, float, bool, None     "", b"", 0, 0.0, False, None
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (str, bytes, bool, int, float, complex, type(None))


def blank_batch(one: Any, two: Any, *, batch_first: bool = True, random: bool = False) -> Any:
    """Builds a batch of no samples.

    Guarantee: no entry of a tensor, array, list, string or number of the arguments is passed on.
    The keys of mappings are; they are taken to be field names.

    Args:
        one: a collated batch of one sample.
        two: a collated batch of two samples. With `two is one`, the arguments are taken to be
            blank already, and a fresh copy is made.
        batch_first: the batch dimension of tensors is their first (`True`) or second (`False`);
            it is always the first of a 1-D tensor.
        random: build one made-up sample instead: size 1 in the batch dimension, random zeros and
            ones.

    Raises:
        TypeError: for a type that is not in the table above, or a batch that is a mere scalar.
    """
    if isinstance(one, _PLAIN):
        raise _unsupported(one)
    return _Blank(batch_first, random)(one, two)


@dataclasses.dataclass(frozen=True)
class _Blank:
    batch_first: bool
    random: bool

    def __call__(self, one: Any, two: Any) -> Any:
        if isinstance(one, Tensor):
            return self._tensor(one, two)
        if isinstance(one, (np.ndarray, np.generic)):
            return self._array(one, two)
        if dataclasses.is_dataclass(one):
            return self._dataclass(one, two)
        if isinstance(one, Mapping):
            return self._mapping(one, two)
        if isinstance(one, (list, tuple)):
            return self._sequence(one, two)
        if isinstance(one, _PLAIN) and not isinstance(one, enum.Enum):
            return None if one is None else type(one)()
        raise _unsupported(one)

    def _shape(self, one: Any, two: Any) -> tuple[int, ...]:
        shape = list(one.shape)
        if tuple(two.shape) != tuple(shape):
            batch_dim = 0 if self.batch_first or len(shape) == 1 else 1
            shape[batch_dim] = 1 if self.random else 0
        return tuple(shape)

    def _tensor(self, one: Tensor, two: Tensor) -> Tensor:
        blank = one.detach().new_zeros(self._shape(one, two))
        return torch.randint_like(blank, 2) if self.random and _has_integers(blank) else blank

    def _array(self, one: Any, two: Any) -> Any:
        blank = np.zeros(self._shape(one, two), dtype=one.dtype)
        if self.random and one.dtype.kind in "biuf":
            blank = np.asarray(np.random.randint(0, 2, blank.shape)).astype(one.dtype)
        return blank[()]  # a scalar stays one

    def _sequence(self, one: Any, two: Any) -> Any:
        entries: list[Any]
        if len(one) == len(two):
            entries = [self(a, b) for a, b in zip(one, two, strict=True)]
        else:
            entries = [self(a, a) for a in one[:1]] if self.random else []
        return type(one)(*entries) if hasattr(one, "_fields") else type(one)(entries)

    def _mapping(self, one: Mapping[Any, Any], two: Mapping[Any, Any]) -> Any:
        entries = {k: self(one[k], two[k]) for k in one if k in two}
        if isinstance(one, defaultdict):
            return type(one)(one.default_factory, entries)
        try:
            rebuilt = type(one)(entries)  # type: ignore[call-arg]
        except TypeError:
            return entries
        return rebuilt

    def _dataclass(self, one: Any, two: Any) -> Any:
        names = [f.name for f in dataclasses.fields(one) if f.init]
        entries = {name: self(getattr(one, name), getattr(two, name)) for name in names}
        return type(one)(**entries)


def _has_integers(blank: Tensor) -> bool:
    return not (blank.is_complex() or blank.is_sparse)


def _unsupported(value: Any) -> TypeError:
    return TypeError(
        f"Unsupported batch type: {type(value).__name__}. An empty batch can be made of tensors, "
        "arrays, mappings, lists, tuples and dataclasses, and of plain scalars inside them; let "
        "collate_fn return these"
    )
