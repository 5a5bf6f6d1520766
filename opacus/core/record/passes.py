"""The forward passes of a model: the running one, and those waiting for their backward.

Note [Forward passes and generations]
    The rows of one forward call belong together. If a second forward starts while the
    first still waits for its backward, both are of one generation: their records
    describe the same batch rows (weight sharing across calls). Outputs that never get a
    backward do not wait once that of others has begun.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from opacus.core.record.named import NamedUnits
from opacus.core.record.provenance import batch_of, possible_batches
from opacus.core.rules.units import Units

logger = logging.getLogger(__name__)


Hidden = dict[str, list[Units | str | None]]


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
            ValueError: They are of different batches, or of units with different names.
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
        names = [call.named.names for call in self.reached if call.named is not None]
        if any(not torch.equal(own, names[0]) for own in names):
            raise ValueError(
                "one backward pass reaches forward passes on rows of different units, of which "
                "each was to be in all of them: backward() and step() for each batch"
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
        note: Called when a backward pass comes here, where its units are in one batch of a step.
        moved: Layers whose rows are not the units in their order.
        kinds: Layers that ran, with the number of dimensions of what they gave.
        tokens: Of each sample, in layers that ran in eager code on one tensor; 0: it was no
            ``[B, T, d]``.
        hidden: Units of each use of a layer without gradients, as reentrant checkpoints let them
            run; a text says why they are unknown.
        in_graphs: Rows of each use of a layer in a compiled graph, where the call was followed;
            a checkpoint that runs the graph again finds them here.
    """

    generation: Generation
    batch: int | None = None
    sizes: frozenset[int] = frozenset()
    rows: dict[str, int] = field(default_factory=dict)
    ordinary: tuple[str, ...] = ()
    made_up: bool = False
    named: NamedUnits | None = None
    note: Callable[[], None] | None = None
    moved: set[str] = field(default_factory=set)
    kinds: set[tuple[str, int]] = field(default_factory=set)
    tokens: dict[str, int] = field(default_factory=dict)
    hidden: Hidden = field(default_factory=dict)
    in_graphs: dict[str, list[Units | None]] = field(default_factory=dict)

    def reach(self) -> None:
        """A backward pass has come here."""
        self.generation.begun = True
        if self.note is not None:
            self.note()


class Passes:
    """See Note [Forward passes and generations].

    Args:
        dim: Dimension of the model's inputs that counts samples.

    Attributes:
        current: The call of the model that runs.
        latest: The latest call of the model.
        generation: The latest one.
        latest_batch: Number of samples of the latest call, where its inputs tell.
        told: The same, if its inputs leave no doubt.
        named: Units of the latest batch, if the user names them.
        given: Called with the inputs of the model, in training.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.given: list[Callable[[Any], None]] = []
        self.current: ForwardPass | None = None
        self.latest: ForwardPass | None = None
        self.generation = Generation()
        self.latest_batch: int | None = None
        self.told: int | None = None
        self.named: NamedUnits | None = None
        self._sizes: frozenset[int] = frozenset()
        self._warned_of_joining = False

    def name_units(self, named: NamedUnits | None) -> None:
        """Whose rows the next batch has, by the user's names; ``None``: row i is unit i."""
        self.named = named

    def begin(self, inputs: tuple[Any, Any]) -> ForwardPass:
        """The model is called with these arguments."""
        if self.generation.begun or not self.generation.waiting:
            self.generation = Generation()
        batch = self.latest_batch = batch_of(inputs, self.dim)
        self._sizes = possible_batches(inputs, self.dim)
        named = self.named if batch != 0 else None
        if named is not None:
            self._sizes = frozenset()
        self.told = batch if batch is not None and self._sizes <= {batch, 1} else None
        # Also of an empty batch: other ranks' units are in it.
        note = None if self.named is None else self.named.note
        self.current = ForwardPass(self.generation, batch, self._sizes, named=named, note=note)
        self.latest = self.current
        self.generation.calls.add(self.current)
        return self.current

    @contextmanager
    def again(self, forward_pass: ForwardPass) -> Iterator[None]:
        """A part of a call that is over runs once more."""
        before, self.current = self.current, forward_pass
        try:
            yield
        finally:
            self.current = before

    def end(self) -> ForwardPass | None:
        """The call has ended, or failed; returns it."""
        ended, self.current = self.current, None
        return ended

    def outside(self, *, in_backward: bool, recomputed: bool) -> ForwardPass:
        """What a layer belongs to that is called outside of the model's forward.

        Args:
            in_backward: Whether a backward pass of ours runs.
            recomputed: Whether a checkpoint runs the layer again.
        """
        if not self.generation.waiting and not in_backward:
            self.generation = Generation()
        sizes = self._sizes if recomputed else frozenset()
        note = None if self.named is None else self.named.note
        one = ForwardPass(self.generation, sizes=sizes, named=self.named, note=note)
        calls = self.generation.calls
        if recomputed and calls and all(call.made_up for call in calls):
            one.batch, one.made_up = 0, True
        return one

    def join(self, forward_pass: ForwardPass) -> None:
        """A backward pass reaches one of several calls of a generation."""
        if forward_pass.generation.join(forward_pass) < 2 or self._warned_of_joining:
            return
        self._warned_of_joining = True
        logger.warning(
            "Losses of several forward passes are summed before one backward pass: row i of each "
            "batch is taken to be the same sample (two views of it, say) and clipped as one. If "
            "they are different samples, call the model once on all of them, or backward() and "
            "step() for each batch."
        )

    @property
    def uses(self) -> list[str]:
        """Names of the layers that ran over the latest batch rows, in the order of first use."""
        return list(self.generation.uses)

    def waiting_batches(self) -> list[int]:
        """Samples of each forward pass of this generation that waits for its backward."""
        passes = {use.forward_pass for use in self.generation.waiting}
        return [one.batch for one in passes if one.batch is not None]

    def samples_are_told(self) -> None:
        """The number of samples comes from the user: what waits need not have the inputs'."""
        self._sizes = frozenset()
        for use in self.generation.waiting:
            use.forward_pass.sizes = frozenset()

    def forget(self) -> None:
        """Drop what is known of earlier forward passes; later ones start afresh."""
        self.current = self.latest = None
        self.generation = Generation()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "current": None, "latest": None, "given": []}
        return {**state, "generation": Generation()}
