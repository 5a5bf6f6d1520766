"""States of a model's own settings, by which it may move rows with inputs of the same shapes.

Mixing that begins after some epochs, say, or another path in another phase: what was found out of
forward passes before such a setting changed is not of those after it. What no setting shows,
:mod:`opacus.core.record.course` may.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

# Attributes that every module has, and one that torch.compile adds.
_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"_compiled_call_impl"}
# States that are told apart.
MOST_STATES = 1000
# A number with more values than these is a counter: it identifies no state.
MOST_NUMBERS = 4
# Entries of a list or dictionary that settings are looked for in.
MOST_ENTRIES = 256
_is_trained = operator.attrgetter("requires_grad")
# How deep a configuration may hold others.
_DEPTH = 3


class Flags:
    """Numbers the states of a model's settings.

    Those are its modules, which of its parameters are trained, and the modules' attributes that
    are true, false, ``None``, text, numbers or functions, also where they stand in lists,
    dictionaries or configurations. A number that keeps changing is a counter, and no setting. Of
    a layer that is frozen nothing is seen: neither whose its rows are, nor that its gradient is
    not a sample's own.

    Attributes:
        parameters: Of the model.
        on_change: Called when its modules have changed.
        state: The number of the latest one, 0 for the first: the same on all ranks, whatever the
            settings are, where they change alike.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._holders: list[Any] = []  # dictionaries and lists, whose sizes are looked at
        self._size = -1  # of all of them
        self._where: list[Any] = []
        self._names: list[Any] = []
        self._kinds: list[Hashable] = []  # by which a counter is known in all modules
        self._latest: list[Any] = []
        self._entries: list[Hashable] = []
        self.parameters: list[nn.Parameter] = []
        self.on_change: Callable[[], None] | None = None
        self._trained: list[bool] = []  # which of them
        self._numbers: dict[Hashable, set[float]] = {}
        self._known: dict[Hashable, int] = {}
        self._passes = 0
        self.state = 0

    def look(self, model: nn.Module) -> None:
        """A forward pass begins: find out which state the model is in."""
        self._passes += 1
        if model is not self._model:
            self._model, self._size = model, -1
        values = None
        if sum(map(len, self._holders)) == self._size:
            # Asked in every step: settings are the same objects as long as nobody sets them.
            with suppress(KeyError, IndexError):
                values = list(map(operator.getitem, self._where, self._names))
        if values is None:
            self._find(model)
        elif not all(map(operator.is_, values, self._latest)):
            pairs = zip(values, self._latest, strict=True)
            changed = [i for i, (new, old) in enumerate(pairs) if new is not old]
            if any(_leads_on(v) for i in changed for v in (values[i], self._latest[i])):
                self._find(model)
            else:
                self._latest = values
                self._note(changed)
        elif self._trained != list(map(_is_trained, self.parameters)):
            self._note(())

    def fixed(self) -> Flags:
        """One that stays in this state."""
        other = _Fixed()
        other.state = self.state
        return other

    def _find(self, model: nn.Module) -> None:
        """Look for settings everywhere."""
        found = list(_settings(model))
        self._where, self._names = [own for own, _, _ in found], [name for _, name, _ in found]
        self._kinds = [kind for _, _, kind in found]
        self._latest = [own[name] for own, name, _ in found]
        self._entries, every = [None] * len(found), list(model.parameters())
        self.parameters = [p for p in every if isinstance(p, nn.Parameter)]
        holders = [part for m in model.modules() for part in (vars(m), m._modules)]
        self._holders = list({id(own): own for own in [*holders, *self._where]}.values())
        lent = len(self.parameters) < len(every)  # for a call (functional_call)
        self._size = -1 if lent else sum(map(len, self._holders))
        self._note(range(len(found)))
        if self.on_change is not None:
            self.on_change()

    def _note(self, places: Any) -> None:
        """These settings are other ones than before."""
        before = list(self._entries) if len(places) < len(self._entries) else []
        for i in places:
            self._entries[i] = self._entry(i)
        trained, self._trained = self._trained, list(map(_is_trained, self.parameters))
        same = trained == self._trained
        if same and before == self._entries:
            return
        key = *self._entries, *self._trained
        if same and self._passes == 2 and all(_is_number(self._latest[i]) for i in places):
            self._known[key] = self.state  # what the first pass has left: sizes, say
        if len(self._known) < MOST_STATES:
            self._known.setdefault(key, len(self._known))
        self.state = self._known.get(key, MOST_STATES)

    def _entry(self, place: int) -> Hashable:
        """By what a setting tells states apart."""
        value, kind = self._latest[place], self._kinds[place]
        if _is_number(value):
            numbers = self._numbers.setdefault(kind, set())
            if len(numbers) <= MOST_NUMBERS:
                numbers.add(value)
            return (kind, value if len(numbers) <= MOST_NUMBERS else None)
        if value is None or isinstance(value, (bool, str)):
            return (kind, value)
        if not isinstance(value, nn.Module) and not _is_code(value):
            return (kind, type(value))
        try:
            return (kind, weakref.ref(value))
        except TypeError:
            return (kind, type(value))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(Flags()), "on_change": self.on_change}


class _Fixed(Flags):
    def look(self, model: nn.Module) -> None:
        pass


def _settings(model: nn.Module) -> Iterator[tuple[Any, Any, Hashable]]:
    """Where each is: in which dictionary or list, under which name, and what kind it is."""
    seen: set[int] = set()
    for module in model.modules():
        yield from ((module._modules, name, name) for name in module._modules)
        for name, value in vars(module).items():
            if name not in _OWN:
                kind = type(module).__qualname__, name
                yield from _settings_in(vars(module), name, value, kind, seen)


def _settings_in(
    own: Any, name: Any, value: Any, kind: Hashable, seen: set[int]
) -> Iterator[tuple[Any, Any, Hashable]]:
    """An attribute or entry, and those that it holds."""
    inner = _entries_of(value)
    if inner is None:
        if value is None or isinstance(value, (bool, str)) or _is_number(value) or _is_code(value):
            yield own, name, kind
        return
    yield own, name, kind  # another configuration may come in its place
    if id(value) in seen:
        return
    seen.add(id(value))
    pairs = enumerate(inner) if isinstance(inner, list) else list(inner.items())
    for key, entry in pairs:
        yield from _settings_in(inner, key, entry, (kind, key), seen)


def _entries_of(value: Any) -> Any:
    """The dictionary or list in which something holds settings, ``None`` if it holds none."""
    if isinstance(value, (dict, list)):
        return value if 0 < len(value) <= MOST_ENTRIES else None
    return vars(value) if _is_configuration(value, _DEPTH) else None


def _is_configuration(value: Any, depth: int) -> bool:
    """Whether an object holds plain data alone, as a configuration does."""
    if isinstance(value, (Enum, type, Tensor, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    held = vars(value)
    if _is_code(value) or not 0 < len(held) <= MOST_ENTRIES:
        return False
    return all(isinstance(v, _DATA) or (depth > 0 and _is_configuration(v, depth - 1))
               for v in held.values())  # fmt: skip


def _leads_on(value: Any) -> bool:
    """Whether there are settings behind a value."""
    return isinstance(value, nn.Module) or _entries_of(value) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_code(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, Tensor))


_DATA = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, set, frozenset, dict, list),
    *(Enum, torch.dtype, torch.device, torch.Size),
)
