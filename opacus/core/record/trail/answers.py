"""Results of the trail in earlier forward passes, so that it need not run again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.core.platform.torch_internals import under_functorch
from opacus.core.record.trail.labels import Labels
from opacus.core.record.trail.mode import Trail
from opacus.core.record.trail.op import is_plain
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units

# Layers, with the number of dimensions of what they gave.
Kinds = AbstractSet[tuple[str, int]]
# The units of each use of a layer in one forward pass.
Uses = dict[str, list[Units | None]]
# Structures of inputs that are remembered at most; more are followed each time.
MOST_ANSWERS = 4096
# In which forward passes of a structure what is remembered is looked at again: its second one,
# which finds most of what is other each time, and seldom after that.
LOOK_AGAIN, INTERVAL = (2, 32), 1000


class Follower:
    """Gives the units of each use of a layer while a model runs.

    The first forward pass of a new structure of inputs is followed by a :class:`Trail`. Where rows
    are moved in ways that depend on shapes alone, what it found is remembered; otherwise every
    pass is followed. Where all layers have the units in their rows, nothing is done any more.

    A model may branch on its own counters, or on values that the program has read. So some later
    passes are followed again; if one differs, all are from then on. So is the pass after one in
    which a layer ran that had not run before, or gave tensors of other dimensions. If there are as
    many units as something else of the inputs (tokens, say), that pass itself is refused: it may
    have a layer with a row for each of those.
    """

    def __init__(self) -> None:
        self._answers: dict[Any, Uses | None] = {}
        self._always: set[Any] = set()  # structures that are followed each time
        self._keys: tuple[Any, Any] = (None, None)
        self._count = 0
        self._trail: Trail | None = None
        self._found: Uses = {}
        self._known: Uses | None = None
        self._places: dict[str, int] = {}
        self._passes: dict[Any, int] = {}  # so many of each structure that is remembered
        self._kinds: dict[Any, Kinds] = {}  # what was followed of it
        self._unfollowed: Any = None  # the structure of the running pass, if it is remembered
        self._dim = 0

    def begin(
        self, inputs: Any, count: int, dim: int, can_follow: Callable[[], bool]
    ) -> bool | None:
        """A forward pass starts.

        Args:
            inputs: Arguments of the model.
            count: Number of units, more than 1.
            dim: Dimension of the inputs with one entry for each unit.
            can_follow: Whether operations can be followed; asked where nothing is remembered.

        Returns:
            Whether :meth:`units_of` has to be asked about each layer; ``None`` if it cannot say.
        """
        self.end()
        leaves = tree_leaves(inputs)
        self._keys = _structure(leaves, count), _shapes(leaves, count)
        known = next((k for k in self._keys if k in self._answers), None)
        self._count, self._dim, self._places = count, dim, {}
        if known is not None and self._keys[0] not in self._always:
            self._known = self._answers[known]
            self._passes[known] = passes = self._passes.get(known, 1) + 1
            if not (passes in LOOK_AGAIN or passes % INTERVAL == 0) or not can_follow():
                self._unfollowed = known
                return self._known is not None
        elif not can_follow():
            return None
        self._trail = Trail([t for t in leaves if isinstance(t, Tensor)], count, dim)
        self._trail.__enter__()
        return True

    def end(self, output: Any = None, kinds: Kinds = frozenset()) -> None:
        """The forward pass has ended.

        Args:
            output: Of the model, ``None`` if it failed.
            kinds: What has run in it.

        Raises:
            ValueError: See :meth:`Trail.check`.
            RuntimeError: The rows of layers that ran for the first time are not known.
        """
        trail, found, known = self._trail, self._found, self._known
        unfollowed, self._unfollowed = self._unfollowed, None
        self._trail, self._found, self._known = None, {}, None
        if trail is None:
            if unfollowed is not None and output is not None:
                self._compare(unfollowed, kinds)
            return
        trail.__exit__(None, None, None)
        if output is not None:
            trail.check([t for t in tree_leaves(output) if isinstance(t, Tensor)])
        if output is None or not found or self._keys[0] in self._always:
            return
        remembered = next((k for k in self._keys if k in self._answers), None)
        if remembered is not None:
            if not _equal(found, known):
                self._always.add(self._keys[0])
                warnings.warn(_CHANGED, stacklevel=2)
            self._kinds[remembered] = self._kinds[remembered] | kinds
            return
        if len(self._answers) >= MOST_ANSWERS:
            return
        units = [u for uses in found.values() for u in uses]
        plain = all(u is None for u in units)
        if trail.moved or trail.chosen or (trail.decided and not plain):
            return
        simple = all(u is None or u.ids is None for u in units)
        key = self._keys[0 if simple else 1]
        self._answers[key], self._kinds[key] = None if plain else found, kinds

    def _compare(self, key: Any, kinds: Kinds) -> None:
        """A pass that was not followed has ended, in which these ran."""
        new = kinds - self._kinds[key]
        if not new:
            return
        del self._answers[key], self._kinds[key], self._passes[key]
        sizes = [own[1:] for own in self._keys[0] if isinstance(own, tuple)]
        if any(1 in (*own[: self._dim], *own[self._dim + 1 :]) for own in sizes):
            self.ran_otherwise(f"layer '{min(new)[0]}'")

    def knows(self, spec: LayerSpec, output: Tensor) -> bool:
        """Whether the units of an output of one row are known: it is not the same for all."""
        if self._trail is not None:
            return isinstance(self._trail.state(output), Labels)
        return self._next(spec) is not None

    def sharing(self, output: Tensor, batch_dim: int) -> Trail | None:
        """The trail, if it shows that all samples share what a layer gave."""
        trail = self._trail
        return trail if trail is not None and trail.is_shared(output, batch_dim) else None

    @property
    def trail(self) -> Trail | None:
        """The one that follows this forward pass, if any does."""
        return self._trail

    def units_of(
        self, spec: LayerSpec, inputs: Sequence[Tensor], output: Tensor, batch_dim: int
    ) -> Units | None:
        """The units of a layer's output; ``None`` if they are its rows.

        Raises:
            ValueError: See :meth:`Trail.layer`.
            RuntimeError: The model runs otherwise than it did on inputs of the same structure.
        """
        if self._trail is not None:
            try:
                units = self._trail.layer(spec, inputs, output, batch_dim)
            except ValueError:
                self._trail.moved = True  # nothing to be remembered
                raise
            self._found.setdefault(spec.name, []).append(units)
            return units
        units = self._next(spec)
        self._places[spec.name] = self._places.get(spec.name, 0) + 1
        if units is None or units.ids is not None or units.dim is not None:
            return units
        rows = output.shape[0] if output.dim() else 0
        if rows % self._count:
            self.ran_otherwise(spec)
        return Units(self._count, block=rows // self._count)

    def ran_otherwise(self, layer: LayerSpec | str) -> None:
        """The model did not do what it did before on inputs of this structure.

        Raises:
            RuntimeError: Always; from now on every such forward pass is followed.
        """
        self._always.add(self._keys[0])
        raise RuntimeError(
            f"{layer} has other rows than in an earlier forward pass with inputs of the same "
            "structure, so whose they are is not known. Nothing was added to the model. From now "
            "on such forward passes are followed: run the step again"
        )

    def _next(self, spec: LayerSpec) -> Units | None:
        uses = (self._known or {}).get(spec.name, [])
        place = self._places.get(spec.name, 0)
        if place >= len(uses):
            self.ran_otherwise(spec)
        units = uses[place]
        if units is not None and units.dim is not None:
            return Units(self._count, dim=units.dim)
        return units

    def __getstate__(self) -> dict[str, Any]:
        none: dict[str, Any] = {"_trail": None, "_known": None, "_unfollowed": None}
        return {**self.__dict__, **none, "_found": {}}


_CHANGED = (
    "the model moves rows in another way than in an earlier forward pass on inputs of the same "
    "structure (as a counter, a random choice or a value that was looked at says). From now on "
    "each pass is followed, so that rows are those of their samples; in passes between the two, "
    "layers may have been given to the wrong samples"
)


def _equal(found: Uses, known: Uses | None) -> bool:
    """Whether a forward pass has the units that are remembered, whatever its sizes."""
    if known is None:
        return all(u is None for uses in found.values() for u in uses)
    pairs = [
        (u, v)
        for name in found.keys() | known.keys()
        for u, v in zip_longest(found.get(name, ()), known.get(name, ()), fillvalue=_NO_USE)
    ]
    return all(_alike(u, v) for u, v in pairs)


def _alike(a: Any, b: Any) -> bool:
    if not (isinstance(a, Units) and isinstance(b, Units)):
        return a is b
    if a.ids is None or b.ids is None:
        return a.ids is b.ids and a.dim == b.dim
    return a.ids.shape == b.ids.shape and torch.equal(a.ids, b.ids.to(a.ids.device))


_NO_USE = object()


def can_follow(model: nn.Module, inputs: Any) -> bool:
    """Whether a forward pass can be followed: nothing is compiled, nor under ``torch.func``."""
    if torch.compiler.is_compiling() or under_functorch() or _is_compiled(model):
        return False
    return all(is_plain(t) for t in tree_leaves(inputs) if isinstance(t, Tensor))


def _is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` made parts of the model."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile
    if dynamo is None:
        return False
    compiled = getattr(dynamo, "OptimizedModule", ())
    return any(
        isinstance(m, compiled) or m._compiled_call_impl is not None for m in model.modules()
    )


def _structure(leaves: Sequence[Any], count: int) -> tuple[Any, ...]:
    """What of a model's inputs may decide how it moves rows, whatever the sizes."""
    return tuple(
        (t.dtype, *((n == count) - (n == 1) for n in t.shape))
        if isinstance(t, Tensor)
        else _plain(t)
        for t in leaves
    )


def _shapes(leaves: Sequence[Any], count: int) -> tuple[Any, ...]:
    return (count, *((t.dtype, t.shape) if isinstance(t, Tensor) else _plain(t) for t in leaves))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, str, float)) else type(value)
