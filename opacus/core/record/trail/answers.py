"""Results of the trail in earlier forward passes, so that it need not run again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from torch import Tensor

from opacus.core.platform.trees import leaves_of, tensors_of
from opacus.core.record.trail.labels import Labels, same_labels
from opacus.core.record.trail.mode import Trail
from opacus.core.record.trail.placed import PlacedRows
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


@dataclass(eq=False)
class Answer:
    """What is remembered of forward passes with inputs of one structure.

    Attributes:
        uses: The units of each use of a layer; ``None`` if they are the rows of all of them.
        ran: Layers that ran in the passes that were followed.
        kinds: What those gave.
        passes: So many have begun, followed or not.
        doubtful: Whether the latest one took another course than those before.
        waits: Whether trained layers may still not have run in a pass that was followed.
        placed: In how many operations a mask puts elements into rows; these are looked at.
        assumed: Whether rows were taken to be the units', though nothing showed it.
        joined: How many put parts of a tensor together, ``None`` if there are no units' among them.
    """

    uses: Uses | None = None
    ran: AbstractSet[str] = frozenset()
    kinds: Kinds = frozenset()
    passes: int = 1
    doubtful: bool = False
    waits: bool = True
    placed: int = 0
    assumed: bool = False
    joined: int | None = None

    def agrees(self, found: Uses) -> bool:
        """Whether a pass that was followed found the same of the layers that ran before."""
        return same_uses(
            {name: uses for name, uses in found.items() if name in self.ran}, self.uses
        )

    def looks_again(self) -> bool:
        """Whether the pass that begins now is followed anyway."""
        doubtful, self.doubtful = self.doubtful, False
        self.passes += 1
        return doubtful or self.passes in LOOK_AGAIN or self.passes % INTERVAL == 0


class Follower:
    """Gives the units of each use of a layer while a model runs.

    The first forward pass of a new structure of inputs is followed by a :class:`Trail`. Where rows
    are moved in ways that depend on shapes alone, what it found is remembered; otherwise every
    pass is followed. Where all layers have the units in their rows, nothing is done any more.

    A model may branch on its own counters, on random numbers (LayerDrop), or on values that the
    program has read. So passes are followed until each trained layer has run in one, and some later
    ones are again; if one differs, all are from then on. Layers that ran on inputs of another
    structure are waited for if layers were left out before, and in few passes. A pass that was not
    followed is refused if a layer ran in it that inputs of this structure had not run, or gave
    tensors of other dimensions: their rows may be anything's.

    Attributes:
        assumed: Whether the latest pass took rows to be the units', though nothing showed it, or
            those before it of its like.

    Args:
        trained: For each layer, by name, what gives the parameters of it that are trained now.
    """

    def __init__(self, trained: Mapping[str, Callable[[], object]]) -> None:
        self._trained = trained
        self.assumed = False
        self._answers: dict[Any, Answer] = {}
        self._absent = set(trained)  # layers that no pass has been followed of
        self._always: set[Any] = set()  # structures that are followed each time
        self._varies = False  # whether other layers ran in passes of one structure
        self._keys: tuple[Any, Any] = (None, None)
        self._count = 0
        self._trail: Trail | None = None
        self._found: Uses = {}
        self._known: Uses | None = None
        self._places: dict[str, int] = {}
        self._unfollowed: Answer | None = None  # what the running pass relies on
        self._looks: PlacedRows | None = None  # at masks, and at what is joined
        self._follow_any = False  # whether the next one is followed, whatever its structure
        self._latest: Answer | None = None  # what the latest one did, or has led to
        self._default: Answer | None = None  # of structures of which nothing is remembered

    def fresh(self, *, relies: bool) -> Follower:
        """One for passes on the side, of a few units of the latest pass.

        Args:
            relies: Whether what the latest pass relied on is relied on in them, or they are
                followed. Other numbers of units, which make another structure if some size is the
                same, make no difference if units are rows.
        """
        other = Follower(self._trained)
        if relies:
            other._absent, other._always = set(), set(self._always)
            other._answers = {key: _looked_at(answer) for key, answer in self._answers.items()}
            latest = self._latest
            if latest is not None and not latest.uses:
                other._default = replace(_looked_at(latest), joined=None)  # of other sizes
        return other

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
        leaves = leaves_of(inputs)
        self._keys = _structure(leaves, count), _shapes(leaves, count)
        known = next((k for k in self._keys if k in self._answers), None)
        self._count, self._places, self._latest = count, {}, None
        answer = self._default if known is None else self._answers[known]
        if answer is not None and self._keys[0] not in self._always:
            self._known = answer.uses
            again = answer.looks_again() or self._waits(answer) or self._follow_any
            self._follow_any = False
            if not again or not can_follow():
                self._unfollowed = self._latest = answer
                self._look_at_masks(answer, can_follow)
                return self._known is not None
        elif not can_follow():
            return None
        self._trail = Trail([t for t in leaves if isinstance(t, Tensor)], count, dim)
        self._look_on(masks=False)
        self._trail.__enter__()
        return True

    def _look_at_masks(self, answer: Answer, can_follow: Callable[[], bool]) -> None:
        if (answer.placed or answer.joined) and can_follow():
            self._look_on(masks=True)

    def _look_on(self, *, masks: bool) -> None:
        self._looks = PlacedRows(self._count, masks=masks)
        self._looks.__enter__()

    @property
    def structure(self) -> Any:
        """That of the inputs of this forward pass."""
        return self._keys[0]

    def follow_next(self, *, like: bool = True) -> None:
        """Follow the next pass, of the structure of this one if it took another course.

        Args:
            like: Whether one of another structure shows nothing.
        """
        self._follow_any |= not like
        if self._unfollowed is not None:
            self._unfollowed.doubtful = True

    def end(self, output: Any = None, kinds: Kinds = frozenset()) -> None:
        """The forward pass has ended.

        Args:
            output: Of the model, ``None`` if it failed.
            kinds: What has run in it.

        Raises:
            ValueError: See :meth:`Trail.check`.
            RuntimeError: A layer ran otherwise than before, in a pass that was not followed.
        """
        trail, found = self._trail, self._found
        unfollowed, self._unfollowed = self._unfollowed, None
        self._trail, self._found, self._known = None, {}, None
        looks, self._looks = self._looks, None
        if looks is not None:
            looks.__exit__(None, None, None)
        self.assumed = unfollowed is not None and unfollowed.assumed
        if trail is None:
            if unfollowed is not None and output is not None:
                self._check_unfollowed(unfollowed, looks, kinds)
            return
        trail.__exit__(None, None, None)
        joined = looks.joined if looks is not None and trail.joined else None
        self._absent -= found.keys() | {name for name, _ in kinds}
        if output is not None:
            self._check(trail, output)
        self.assumed = trail.assumed
        if output is None or not found or self._keys[0] in self._always:
            return
        remembered = next((k for k in self._keys if k in self._answers), None)
        answer = None if remembered is None else self._answers.pop(remembered)
        if answer is not None and not (
            answer.agrees(found) and (answer.placed, answer.joined) == (trail.placed, joined)
        ):
            self._always.add(self._keys[0])
            warnings.warn(_CHANGED, stacklevel=2)
            return
        self._remember(trail, answer, found, kinds, joined)

    def _check_unfollowed(self, known: Answer, looks: PlacedRows | None, kinds: Kinds) -> None:
        if looks is not None and looks.seen != known.placed:
            self.ran_otherwise("masked_scatter")
        if looks is not None and known.joined not in (None, looks.joined):
            self.ran_otherwise("what the model puts together from parts")
        if other := kinds - known.kinds:
            self._answers = {k: a for k, a in self._answers.items() if a is not known}
            raise _ran_otherwise(f"layer '{min(other)[0]}'")

    def _check(self, trail: Trail, output: Any) -> None:
        try:
            trail.check(tensors_of(output))
        except ValueError:
            self._forget()
            raise

    def _forget(self) -> None:
        """What this pass showed is refused: the next ones of its structure are followed, too."""
        for key in self._keys:
            self._answers.pop(key, None)

    def _waits(self, answer: Answer) -> bool:
        """Whether trained layers have run in no pass that was followed, or not yet in such ones."""
        if self._varies and answer.waits and answer.passes <= LOOK_AGAIN[-1]:
            left_out = (name for name in self._trained if name not in answer.ran)
            answer.waits = any(self._trained[name]() for name in left_out)
            return answer.waits
        absent = sorted(name for name in self._absent if self._trained[name]())
        if absent and answer.passes == LOOK_AGAIN[-1] + 1:
            some = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
            warnings.warn(_WAITS.format(some), stacklevel=2)
        return bool(absent)

    def _remember(
        self,
        trail: Trail,
        answer: Answer | None,
        found: Uses,
        kinds: Kinds,
        joined: int | None,
    ) -> None:
        """A pass was followed that agrees with what was known, if anything was."""
        units = [u for uses in found.values() for u in uses]
        plain = all(u is None for u in units)
        decided = trail.decided and (trail.picked or not plain)
        if trail.moved or trail.chosen or decided:
            return
        if len(self._answers) >= MOST_ANSWERS:
            return
        ran = found.keys() | {name for name, _ in kinds}
        self._varies |= answer is not None and ran != answer.ran
        if answer is None or (answer.uses is None and not plain):
            answer = Answer()
        answer.uses = None if plain else found
        answer.kinds, answer.placed, answer.joined = answer.kinds | kinds, trail.placed, joined
        answer.ran = answer.ran | ran
        answer.assumed |= trail.assumed
        self._latest = answer
        # Loops over samples or times join parts more or less often, as sizes say.
        simple = joined is None and all(u is None or u.ids is None for u in units)
        self._answers[self._keys[0 if simple else 1]] = answer

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
                self._forget()
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

    def aside(self) -> AbstractContextManager[None]:
        """Operations in it are not the model's."""
        return nullcontext() if self._trail is None else self._trail.aside()

    def ran_otherwise(self, layer: LayerSpec | str) -> None:
        """The model did not do what it did before on inputs of this structure.

        Raises:
            RuntimeError: Always; from now on every such forward pass is followed.
        """
        self._always.add(self._keys[0])
        raise _ran_otherwise(layer)

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
        none = dict.fromkeys(("_trail", "_known", "_unfollowed", "_looks"))
        return {**self.__dict__, **none, "_found": {}}


def _looked_at(answer: Answer) -> Answer:
    """One that is not looked at again."""
    return replace(answer, passes=LOOK_AGAIN[-1] + 1, doubtful=False)


_CHANGED = (
    "the model moves rows in another way than in an earlier forward pass on inputs of the same "
    "structure (as a counter, a random choice or a value that was looked at says). From now on "
    "each pass is followed, so that rows are those of their samples; in passes between the two, "
    "layers may have been given to the wrong samples"
)


def _ran_otherwise(layer: LayerSpec | str) -> RuntimeError:
    return RuntimeError(
        f"{layer} has other rows than in an earlier forward pass with inputs of the same "
        "structure, so whose they are is not known. Nothing was added to the model. From now "
        "on such forward passes are followed: run the step again"
    )


def same_uses(
    found: Mapping[str, Sequence[Any]], known: Mapping[str, Sequence[Any]] | None
) -> bool:
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
        return bool(a == b)
    if a.ids is None or b.ids is None:
        return a.ids is b.ids and a.dim == b.dim
    return a.ids.shape == b.ids.shape and same_labels(a.ids, b.ids)


_NO_USE = object()

_WAITS = (
    "trained, but did not run in the first forward passes: {}. Each pass is followed until they "
    "do, so that their rows are those of their samples, which takes time; freeze what never runs "
    "(it gets nothing but noise)"
)


def _structure(leaves: Sequence[Any], count: int) -> tuple[Any, ...]:
    """What of a model's inputs may decide how it moves rows, whatever the sizes."""
    return tuple(
        (t.dtype, *((n == count) - (n == 1) for n in t.shape))
        if isinstance(t, Tensor)
        else constant(t)
        for t in leaves
    )


def _shapes(leaves: Sequence[Any], count: int) -> tuple[Any, ...]:
    return (count, *((t.dtype, t.shape) if isinstance(t, Tensor) else constant(t) for t in leaves))


def constant(value: Any) -> Any:
    """What of an argument that is no tensor may decide what a model does."""
    return value if isinstance(value, (bool, int, str, float)) else type(value)
