"""What a forward pass is the first to change of what modules hold.

A model may begin late to keep something of its samples: averages that start after a warm-up, a
queue that was empty so far. What a pass changes is seen by identity and version, without a look at
values of tensors; whether it depends on samples, the isolation check finds out.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from opacus.core.platform.attributes import attributes_of, fill, is_array

# Entries of a container that are looked at, and elements of an array.
MOST_ENTRIES = 256
# Passes that are the first to change something; each is checked.
MOST_EVENTS = 64
_NUMBERS = (int, float, complex)
_CONTAINERS = (list, deque, dict, set, tuple)
_version = operator.attrgetter("_version")
Place = tuple[str, str]  # the path of a module, a name in it


class Start:
    """What a forward pass has changed, as it was before, with all numbers."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, Any, Any]] = []  # dictionary, name, value
        self.entries: list[tuple[Any, list[Any]]] = []  # of containers

    def put_back(self) -> None:
        """The modules have it again; what was changed in place in tensors stays."""
        for own, name, value in self.values:
            own[name] = value
        for value, entries in self.entries:
            fill(value, entries)


class Changes:
    """Notices the first forward pass that changes something that modules hold.

    These are buffers, frozen parameters, and attributes that are numbers, tensors, NumPy's arrays,
    or containers and objects of these. What has changed in a pass before is not looked at again,
    nor is what the first pass changes, unless it makes it: it is followed and checked anyway.

    Attributes:
        start: What the latest pass began with, if it was the first to change something.
    """

    def __init__(self) -> None:
        self.start: Start | None = None
        self._changing: set[Place] = set()
        self._model: nn.Module | None = None
        self._holders: list[Any] = []  # dictionaries, whose sizes are looked at
        self._size = -1  # of all of them
        self._places: list[Place] = []
        self._where: list[Any] = []
        self._names: list[str] = []
        self._latest: list[Any] = []
        self._tensors: dict[int, Tensor] = {}  # by place
        self._deep: list[int] = []  # places of what has entries
        self._versions: list[int] = []
        self._inside: list[list[Any]] = []
        self._passes = self._events = 0
        self._runs = False

    def begin(self, model: nn.Module) -> None:
        """A forward pass begins."""
        self.start, self._runs = None, True
        now = self._now() if model is self._model else None
        if now is None:
            self._find(model)
        elif not all(map(operator.is_, now, self._latest)):
            self._take(now)
        self._versions = list(map(_version, self._tensors.values()))
        self._inside = [_inside(self._latest[i]) for i in self._deep]

    def end(self, *, counts: bool) -> bool:
        """It has come through; whether it has changed what none before it has.

        Args:
            counts: Whether it can be found out of this pass what depends on samples: else a later
                one that changes the same is taken for the first.
        """
        if not self._runs:
            return False
        self._runs = False
        self._passes += counts
        now = self._now()
        places = None if now is None else self._changed(now)
        if now is not None and not places:
            self._latest = now  # numbers, at most
            return False
        return self._note(places, counts)

    # --- looking ---

    def _now(self) -> list[Any] | None:
        """What modules hold in the places that are known; ``None`` if there are others."""
        if sum(map(len, self._holders)) != self._size:
            return None
        try:
            return list(map(operator.getitem, self._where, self._names))
        except KeyError:
            return None

    def _changed(self, now: list[Any]) -> list[int]:
        """Where something has changed, but for what is known to: asked in every step."""
        found: list[int] = []
        same = list(map(operator.is_, now, self._latest))
        if not all(same):
            found += [i for i, one in enumerate(same) if not one and self._differs(i, now[i])]
        versions = list(map(_version, self._tensors.values()))
        if versions != self._versions:
            pairs = zip(self._tensors, versions, self._versions, strict=True)
            found += [i for i, new, old in pairs if new != old]
        pairs_inside = zip(self._deep, self._inside, strict=True)
        found += [i for i, old in pairs_inside if not _same(old, _inside(self._latest[i]))]
        return found

    def _differs(self, place: int, now: Any) -> bool:
        before = self._latest[place]
        if self._places[place] in self._changing:
            return False
        return not (_is_number(before) and type(now) is type(before) and now == before)

    def _note(self, places: list[int] | None, counts: bool) -> bool:
        """Note what has changed in these places, or wherever it has if other ones are there now."""
        where, names, values = self._where, self._names, self._latest
        before, entries = self._places, dict(zip(self._deep, self._inside, strict=True))
        first: set[Place] = set()
        made: set[Place] = set()
        if places is None:
            assert self._model is not None
            held = {(path, name): _is_number(own[name]) for path, own, name in _held(self._model)}
            first = held.keys() - set(before) - self._changing
            made = {place for place in first if not held[place]}
            places = self._changed([own.get(name) for own, name in zip(where, names, strict=True)])
        first |= {before[i] for i in places} - self._changing
        self._size, self._latest, self._inside = -1, [], []
        if not first or not counts:
            return False
        begins = self._passes == 1
        made |= {before[i] for i in places if values[i] is None}
        self._changing |= first - made if begins else first  # left out, but for numbers
        if not begins and self._events < MOST_EVENTS:
            self._events += 1
            self.start = Start()
            self.start.values += [
                (where[i], names[i], value)
                for i, value in enumerate(values)
                if i in places or _is_number(value)
            ]
            changed = [(values[i], entries[i][0]) for i in places if i in entries]
            self.start.entries += [
                (value, inner)
                for value, inner in changed
                if isinstance(value, (list, deque, dict, set)) and isinstance(inner, list)
            ]
        return self.start is not None

    def _find(self, model: nn.Module) -> None:
        """Look for what modules hold everywhere."""
        self._model = model
        found = [one for one in _held(model) if self._is_of_use(*one)]
        self._places = [(path, name) for path, _, name in found]
        self._where, self._names = [own for _, own, _ in found], [name for _, _, name in found]
        parts = list(model.modules())
        self._holders = [own for m in parts for own in (vars(m), m._buffers)]
        self._size = sum(map(len, self._holders))
        self._take([own[name] for _, own, name in found])

    def _take(self, values: list[Any]) -> None:
        self._latest = values
        self._tensors = {i: v for i, v in enumerate(values) if _has_version(v)}
        self._deep = [i for i, v in enumerate(values) if _has_entries(v)]

    def _is_of_use(self, path: str, own: Any, name: str) -> bool:
        return (path, name) not in self._changing or _is_number(own[name])

    def __getstate__(self) -> dict[str, Any]:
        return vars(Changes())


def _held(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """The path of a module, a dictionary of it, and the name of what it holds there."""
    for path, module in model.named_modules():
        constants = getattr(type(module), "__constants__", ())
        for name, value in attributes_of(module).items():
            if name not in constants and (value is None or _is_watched(value)):
                yield path, vars(module), name
        for name, value in module._buffers.items():
            if value is None or _has_version(value):
                yield path, module._buffers, name
        for name, value in module._parameters.items():
            if value is not None and not value.requires_grad and _has_version(value):
                yield path, module._parameters, name


def _is_watched(value: Any) -> bool:
    return _is_number(value) or _has_version(value) or _has_entries(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _has_version(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_inference()


def _has_entries(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(isinstance(entry, Tensor) for entry in value[:MOST_ENTRIES])
    if isinstance(value, _CONTAINERS) or is_array(value):
        return True
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value):
        return False
    return any(isinstance(entry, Tensor) for entry in getattr(value, "__dict__", {}).values())


def _inside(value: Any) -> list[Any]:
    """The entries of a value, or how many these are, and the versions of tensors among them."""
    if is_array(value):
        small = value.size <= MOST_ENTRIES and not value.dtype.hasobject
        return [value.tobytes() if small else value.shape, []]
    inner = value if isinstance(value, _CONTAINERS) else vars(value)
    if len(inner) > MOST_ENTRIES:
        return [len(inner), []]
    entries = list(inner.items() if isinstance(inner, dict) else inner)
    own = inner.values() if isinstance(inner, dict) else inner
    return [entries, [t._version for t in own if _has_version(t)]]


def _same(one: list[Any], two: list[Any]) -> bool:
    (entries, versions), (others, now) = one, two
    if not isinstance(entries, list) or not isinstance(others, list):
        return type(entries) is type(others) and entries == others
    if len(entries) != len(others) or versions != now:
        return False
    return all(map(_alike, entries, others))


def _alike(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two) == 2:
        return all(a is b or (_is_number(a) and a == b) for a, b in zip(one, two, strict=True))
    return _is_number(one) and type(one) is type(two) and bool(one == two)
