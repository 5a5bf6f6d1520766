"""Tensors in what models take and return: containers that pytrees know, and others.

Dataclasses, mappings (``UserDict``, the encodings of transformers) and plain objects with tensors
among their attributes are single leaves to ``torch.utils._pytree``. Here they are opened, too.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_CLOSED = (Tensor, nn.Module, type, types.ModuleType, str, bytes, int, float, bool, type(None))


@dataclass(frozen=True)
class Tree:
    """How leaves were found in a value: a pytree, and what was opened of its leaves.

    Attributes:
        spec: Of the pytree.
        opened: For each leaf of it, ``None``, or the object that it is, with a tree of its parts.
    """

    spec: TreeSpec
    opened: Sequence[tuple[Any, Tree] | None]

    def rebuilt(self, leaves: Iterator[Any]) -> Any:
        """The value with other leaves; what was opened is copied."""
        own = [
            next(leaves) if one is None else _with_parts(one[0], one[1].rebuilt(leaves))
            for one in self.opened
        ]
        return tree_unflatten(own, self.spec)


def flatten(
    value: Any, closed: type | None = None, around: tuple[Any, ...] = ()
) -> tuple[list[Any], Tree]:
    """The leaves of a value, in order, and its tree.

    Args:
        value: Anything.
        closed: Objects of this type are leaves.
        around: Objects that it is in, which are leaves inside of themselves.
    """
    is_leaf = None if closed is None else lambda one: isinstance(one, closed)
    leaves, spec = tree_flatten(value, is_leaf)
    found: list[Any] = []
    opened: list[tuple[Any, Tree] | None] = []
    for leaf in leaves:
        shut = isinstance(leaf, _CLOSED) or (closed is not None and isinstance(leaf, closed))
        parts = None if shut or any(leaf is one for one in around) else _parts(leaf)
        if parts is None:
            found.append(leaf)
            opened.append(None)
        else:
            inner, tree = flatten(parts, closed, (*around, leaf))
            found += inner
            opened.append((leaf, tree))
    return found, Tree(spec, opened)


def unflatten(leaves: Sequence[Any], tree: Tree) -> Any:
    """A value like the one whose tree this is, with these leaves."""
    return tree.rebuilt(iter(leaves))


def leaves_of(value: Any, closed: type | None = None) -> list[Any]:
    """The leaves of a value, in order; see :func:`flatten`."""
    return flatten(value, closed)[0]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with ``function`` of each tensor in its place."""
    leaves, tree = flatten(value)
    return unflatten([function(x) if isinstance(x, Tensor) else x for x in leaves], tree)


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """What is in an object that is not a pytree, by name; ``None`` if it is not opened."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    parts = getattr(leaf, "__dict__", {})
    return dict(parts) if any(isinstance(part, Tensor) for part in parts.values()) else None


def _with_parts(leaf: Any, parts: dict[Any, Any]) -> Any:
    """A copy of an object that was opened, with other parts."""
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return parts
    made = copy.copy(leaf)
    for name, part in parts.items():
        if isinstance(made, MutableMapping):
            made[name] = part
        else:
            object.__setattr__(made, name, part)
    return made
