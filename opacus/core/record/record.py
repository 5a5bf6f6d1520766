"""What a model's run leaves behind: forward passes, and a record of each use of a layer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from opacus.core.record.layers import Layer
from opacus.core.record.named import NamedUnits
from opacus.core.rules.spec import LayerSpec


class Waiting(Protocol):
    """What waits for its backward: the use of a layer, or of the whole model."""

    forward_pass: ForwardPass


@dataclass(eq=False)
class Generation:
    """Forward passes over the same batch rows, with the taps that still wait.

    Attributes:
        uses: How often each layer ran.
        recomputed: Layers that activation checkpoints have run again.
    """

    uses: dict[str, int] = field(default_factory=dict)
    recomputed: set[str] = field(default_factory=set)
    begun: bool = False
    waiting: weakref.WeakSet[Waiting] = field(default_factory=weakref.WeakSet)
    calls: weakref.WeakSet[ForwardPass] = field(default_factory=weakref.WeakSet)
    reached: weakref.WeakSet[ForwardPass] = field(default_factory=weakref.WeakSet)

    def join(self, forward_pass: ForwardPass) -> int:
        """A backward pass reaches one of several calls of the model.

        Returns:
            How many calls have been reached.

        Raises:
            ValueError: They are of different batches.
        """
        self.reached.add(forward_pass)
        sizes = sorted({call.batch for call in self.reached if call.batch is not None})
        if len(sizes) > 1:
            raise ValueError(
                f"one backward pass reaches forward passes on {' and '.join(map(str, sizes))} "
                "samples: row i of each was to be the same sample, so what belongs to one sample "
                "is unknown. Call the model once on all samples, or backward() and step() for "
                "each batch"
            )
        return len(self.reached)

    def __reduce__(self) -> tuple[type[Generation], tuple[()]]:
        return Generation, ()  # copies and pickles of a model start afresh


@dataclass(eq=False)
class ForwardPass:
    """One call of the model: its generation and the batch rows seen so far.

    Attributes:
        batch: Number of samples, if the model's inputs agree on one.
        sizes: All numbers of samples that the inputs allow; empty if they tell nothing.
        ordinary: Names of parameters that an ordinary loss has run backward through.
        made_up: Whether its only row is made up; see :mod:`opacus.core.record.empty`.
        named: Its units, if the user names them.
    """

    generation: Generation
    batch: int | None = None
    sizes: frozenset[int] = frozenset()
    rows: dict[str, int] = field(default_factory=dict)
    ordinary: tuple[str, ...] = ()
    made_up: bool = False
    named: NamedUnits | None = None

    def saw(self, layer: str, rows: int) -> None:
        """A layer ran on so many rows."""
        self.rows[layer] = max(self.rows.get(layer, 0), rows)


@dataclass(eq=False)
class Record:
    """What the backward pass revealed about one use of a layer.

    Only :meth:`hold` changes its tensors: what is computed from them is computed once.

    Attributes:
        activations: Batch-first inputs of the layer (a ``Call`` for the generic rule).
        backprops: Gradient with respect to its output, batch first.
        rows: Largest number of rows the layer saw in this forward pass.
        reused: Whether the layer was used more than once in this generation.
        forward_pass: The call of the model that it belongs to.
    """

    layer: Layer
    spec: LayerSpec
    activations: Any
    backprops: Any
    rows: int
    reused: bool
    generation: Generation
    forward_pass: ForwardPass | None = None
    versions: list[int] | None = None  # of the tensors, since it was kept
    averaged: int | None = None  # number of rows that a mean of losses is of, if not `rows`
    regrouped: bool = False  # its rows were not the units
    borrowed: bool = False  # a compiled graph may write over the tensors once they are delivered

    @property
    def mean_of(self) -> int:
        """Number of losses that a mean loss divides by."""
        return self.rows if self.averaged is None else self.averaged

    @cached_property
    def batch(self) -> int:
        """Number of samples in this record."""
        first = self.backprops if isinstance(self.backprops, Tensor) else self.backprops[0]
        return first.shape[0]  # type: ignore[no-any-return]

    @cached_property
    def device(self) -> torch.device:
        """Where its backprops are."""
        first = self.backprops if isinstance(self.backprops, Tensor) else self.backprops[0]
        return first.device  # type: ignore[no-any-return]

    @property
    def recomputed(self) -> bool:
        """Whether its activations were computed in the backward pass, by a checkpoint."""
        return self.spec.name in self.generation.recomputed

    @cached_property
    def elements(self) -> int:
        """Number of elements of activations and backprops."""
        return sum(t.numel() for t in self.tensors)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among activations and backprops."""
        activations, backprops = self.activations, self.backprops
        if type(activations) is tuple and isinstance(backprops, Tensor):
            return [*activations, backprops]
        leaves, _ = tree_flatten((activations, backprops))
        return [t for t in leaves if isinstance(t, Tensor)]

    def hold(self) -> None:
        """The record is used after its delivery: copy what is borrowed."""
        if self.borrowed:
            held = (self.activations, self.backprops)
            self.activations, self.backprops = tree_map_only(Tensor, torch.clone, held)
            self.__dict__.pop("tensors", None)  # those that were borrowed
            self.borrowed = False

    def owned(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """``grads`` made from this record, none of which lies in memory that is borrowed."""
        if not self.borrowed:
            return grads
        places = {t.untyped_storage().data_ptr() for t in self.tensors}
        borrowed = {n for n, g in grads.items() if g.untyped_storage().data_ptr() in places}
        return {n: g.clone() if n in borrowed else g for n, g in grads.items()}
