"""What runs of a model leave in plain attributes: numbers, lists of them, NumPy's arrays.

No trail follows these. A model that reads them in a later batch trains on samples of this one.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn

from opacus.core.platform.attributes import MOST_ELEMENTS, attributes_of, is_array

# Entries of a container, with those in containers in it, and levels of these.
MOST_ENTRIES, DEPTH = 4096, 3
KEPT = (
    "what the model keeps of samples in {} changes the gradients of samples of a later batch, "
    "first at {}. Compute it from each sample alone"
)
_NUMBERS = (bool, int, float, complex)
_CONTAINERS = (list, tuple, set, deque)

# The attribute of a module, and its value.
Left = dict[tuple[nn.Module, str], bytes]


def left_values(model: nn.Module) -> Left:
    """Copies of all plain attributes of a model and its parts."""
    return {
        (part, name): pickle.dumps(value)
        for part in model.modules()
        for name, value in attributes_of(part).items()
        if _is_plain(value)
    }


def put_values(values: Left) -> None:
    """Let the modules have these."""
    for (part, name), value in values.items():
        vars(part)[name] = pickle.loads(value)


def that_differ(some: Iterable[Left]) -> list[Left]:
    """Two of these that are not alike, in what differs between them; else nothing."""
    first, *others = some
    for other in others:
        names = [name for name in first if name in other and first[name] != other[name]]
        if names:
            return [{name: values[name] for name in names} for values in (first, other)]
    return []


def kept(model: nn.Module, values: Left, where: str) -> str:
    """What is wrong with a model that reads such values in a later batch, in this layer."""
    paths = {module: path for path, module in model.named_modules()}
    names = sorted(f"{paths.get(part, '')}.{name}".strip(".") for part, name in values)
    return KEPT.format(", ".join(f"'{name}'" for name in names[:5]), where)


def _is_plain(value: Any) -> bool:
    """Whether it is a number, or holds numbers alone."""
    if isinstance(value, _NUMBERS):
        return True
    if is_array(value):
        return value.size <= MOST_ELEMENTS and not value.dtype.hasobject  # type: ignore[no-any-return]
    if type(value).__module__ == "numpy":  # one of its numbers
        return hasattr(value, "dtype")
    return isinstance(value, (*_CONTAINERS, dict)) and _entries(value, DEPTH) > 0


def _entries(value: Any, depth: int) -> int:
    """Number of entries, 0 if there are none, too many, or others than plain ones."""
    if not depth or not 0 < len(value) <= MOST_ENTRIES:
        return 0
    entries = value.values() if isinstance(value, dict) else value
    found = 0
    for entry in entries:
        inner = isinstance(entry, (*_CONTAINERS, dict))
        own = _entries(entry, depth - 1) if inner else int(_is_plain(entry))
        if not own:
            return 0
        found += own
    return found if found <= MOST_ENTRIES else 0
