"""States of a model's own flags, by which it may move rows with inputs of the same shapes.

Mixing that begins after some epochs, say, or another path in another phase: what was found out of
forward passes before such a flag was set is not of those after it.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

from torch import nn

_OWN = frozenset(vars(nn.Module())) - {"training"}
# States that are told apart.
MOST_STATES = 1000


class Flags:
    """Numbers the states of a model's flags.

    Those are the attributes of its modules that are true, false, ``None`` or text.

    Attributes:
        state: The number of the latest one, 0 for the first: the same on all ranks, whatever the
            flags are, where they change alike.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._modules: list[dict[str, Any]] = []  # the attributes of each
        self._size = -1  # of all of them
        self._where: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._latest: list[Any] = []
        self._known: dict[Hashable, int] = {}
        self.state = 0

    def look(self, model: nn.Module) -> None:
        """A forward pass begins: find out which state the model is in."""
        if model is not self._model:
            self._model, self._size = model, -1
            self._modules = [vars(module) for module in model.modules()]
        size = sum(map(len, self._modules))
        if size != self._size:
            self._size = size
            self._find()
        values = list(map(dict.get, self._where, self._names))
        # Asked in every step: flags are the same objects as long as nobody sets them.
        if len(values) != len(self._latest) or not all(map(operator.is_, values, self._latest)):
            self._latest, key = values, tuple(map(_flag, self._names, values))
            if len(self._known) < MOST_STATES:
                self._known.setdefault(key, len(self._known))
            self.state = self._known.get(key, MOST_STATES)

    def _find(self) -> None:
        found = [
            (own, name)
            for own in self._modules
            for name, value in own.items()
            if name not in _OWN and _is_flag(value)
        ]
        self._where, self._names = [own for own, _ in found], [name for _, name in found]
        self._latest = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(Flags())


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, (bool, str))


def _flag(name: str, value: Any) -> Hashable:
    return name, value if _is_flag(value) else type(value)
