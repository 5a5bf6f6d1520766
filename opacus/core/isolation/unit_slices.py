"""The rows of some units of a batch, cut out of a model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from opacus.core.platform.trees import leaves_of, map_tensors, tensors_of

# What trainers that normalise a loss by hand pass to the model: tokens in the whole batch.
_TOKENS, _LABELS, _IGNORED = "num_items_in_batch", "labels", -100


@dataclass(frozen=True)
class UnitRows:
    """Where a batch of ``units`` units has their rows.

    Attributes:
        units: Number of units of the batch.
        batch_first: Whether dimension 0 (rather than 1) of tensors counts units.
        squares: Whether a matrix ``[units, units]`` among the inputs has a row for each unit
            (else it belongs to the batch as a whole, like an attention mask ``[T, T]``).
    """

    units: int
    batch_first: bool = True
    squares: bool = True

    def dim(self, tensor: Tensor) -> int | None:
        """The dimension of ``tensor`` that counts units, ``None`` if there is none."""
        usual = 0 if self.batch_first or tensor.dim() < 2 else 1
        for dim in dict.fromkeys((usual, 0)):
            if tensor.dim() > dim and tensor.shape[dim] == self.units:
                return dim
        return None

    def divides(self, inputs: Any) -> bool:
        """Whether ``inputs`` can be cut into units at all."""
        if any(isinstance(leaf, PackedSequence) for leaf in leaves_of(inputs, PackedSequence)):
            return False
        tensors = tensors_of(inputs)
        plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_sparse for t in tensors)
        return plain and any(self._cut(t) is not None for t in tensors)

    def has_squares(self, inputs: Any) -> bool:
        """Whether ``squares`` makes a difference, and something is cut either way."""
        tensors = tensors_of(inputs)
        whole = [t for t in tensors if _is_square(t, self.units)]
        return bool(whole) and any(self.dim(t) is not None for t in tensors if t not in set(whole))

    def select(self, inputs: Any, rows: Sequence[int]) -> Any:
        """``inputs`` of the units ``rows`` alone; what has no row for each unit stays."""

        def pick(tensor: Tensor) -> Tensor:
            dim = self._cut(tensor)
            if dim is None:
                return tensor
            index = torch.tensor(list(rows), device=tensor.device, dtype=torch.long)
            own = tensor.detach().index_select(dim, index)
            return own.requires_grad_(tensor.requires_grad)

        return _with_own_tokens(inputs, map_tensors(pick, inputs))

    def made_up(self, inputs: Any, rows: int) -> Any:
        """For a batch of no units, or a made-up one: ``inputs`` with ``rows`` rows of ones."""
        tensors = tensors_of(inputs)
        if self.units == 0 and all(self._cut(t) is None for t in tensors):
            return replace(self, units=1).made_up(inputs, rows)

        def fill(tensor: Tensor) -> Tensor:
            dim = self._cut(tensor)
            if dim is None:
                return tensor
            shape = [*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]]
            ones = torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
            return ones.requires_grad_(tensor.requires_grad)

        return map_tensors(fill, inputs)

    def output_dim(self, output: Tensor) -> int | None:
        """The dimension of an output that counts units, or m rows for each unit, if it is one.

        In a time-major model ``[units, units]`` is taken for the output of a head.
        """
        if _is_square(output, self.units):
            return 0
        dim = self.dim(output)
        if dim is None and output.dim() and self.units and output.shape[0] % self.units == 0:
            return 0
        return dim

    def _cut(self, tensor: Tensor) -> int | None:
        if not self.squares and _is_square(tensor, self.units):
            return None
        return self.dim(tensor)


def structure(inputs: Any, units: int, *, sizes: bool, training: bool) -> Hashable:
    """The structure of a batch, independent of its size: keys, types, equal sizes.

    Args:
        inputs: What the model is called with.
        units: Number of units.
        sizes: Whether it counts which sizes equal the number of units (a coincidence of
            this rank's batch; ranks that must decide alike leave it out).
        training: The model's mode.
    """
    return (_form(inputs, units if sizes else None), training, units > 1 if sizes else None)


def _form(value: Any, units: int | None) -> Hashable:
    """Of one argument; asked in every step, so without the help of a tree of types."""
    if isinstance(value, Tensor):
        if units is None:
            return (value.dtype, value.dim())
        return (value.dtype, *["n" if s == units else s == 1 for s in value.shape])
    if isinstance(value, (tuple, list)):
        return tuple([_form(v, units) for v in value])
    if isinstance(value, Mapping):
        return tuple([(k, _form(v, units)) for k, v in value.items()])
    return value if isinstance(value, (bool, str)) else type(value).__name__


def number_of_units(inputs: Any, known: int | None, batch_first: bool) -> int | None:
    """Number of units: ``known``, or as many as the first tensor has rows."""
    if known is not None:
        return known
    for leaf in tensors_of(inputs):
        if leaf.dim():
            return leaf.shape[0 if batch_first or leaf.dim() < 2 else 1]
    return None


def fitted(cotangent: Tensor, like: Tensor) -> Tensor:
    """``cotangent`` in the shape of ``like``: cut, and zeros where it is smaller.

    An output may be padded to the longest unit of its batch.
    """
    if cotangent.shape != like.shape:
        fresh = torch.zeros(like.shape, dtype=cotangent.dtype, device=cotangent.device)
        common = tuple(slice(min(a, b)) for a, b in zip(cotangent.shape, like.shape, strict=True))
        fresh[common] = cotangent[common]
        cotangent = fresh
    return cotangent.to(device=like.device, dtype=like.dtype)


def _with_own_tokens(inputs: Any, own: Any) -> Any:
    """Let a normaliser of the whole batch follow the labels of the rows that were cut out."""
    if not (isinstance(own, tuple) and len(own) == 2 and isinstance(own[1], dict)):
        return own
    count, labels = own[1].get(_TOKENS), inputs[1].get(_LABELS)
    if count is None or not isinstance(labels, Tensor):
        return own
    share = (own[1][_LABELS] != _IGNORED).sum() / (labels != _IGNORED).sum().clamp(min=1)
    return own[0], {**own[1], _TOKENS: share.to(torch.float32) * count}


def _is_square(tensor: Tensor, units: int) -> bool:
    return tuple(tensor.shape) == (units, units)
