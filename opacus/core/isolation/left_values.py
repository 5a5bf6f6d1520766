"""What runs of a model leave in plain attributes: numbers, text, lists of them, NumPy's arrays.

No trail follows these. A model that reads them in a later batch trains on samples of this one.
"""

from __future__ import annotations

import copy
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
_NUMBERS = (bool, int, float, complex, str)
_CONTAINERS = (list, tuple, set, deque)

# The attribute of a module; a copy of its value, and the numbers in it as text.
LeftValues = dict[tuple[nn.Module, str], tuple[Any, str]]


def left_values(model: nn.Module) -> LeftValues:
    """Copies of all attributes of a model and its parts that hold numbers alone."""
    return {
        (part, name): (copy.deepcopy(value), repr(numbers))
        for part in model.modules()
        for name, value in attributes_of(part).items()
        if (numbers := _numbers(value, DEPTH))
    }


def put_values(values: LeftValues) -> None:
    """Let the modules have these."""
    for (part, name), (value, _) in values.items():
        vars(part)[name] = copy.deepcopy(value)


def that_differ(some: Iterable[LeftValues]) -> list[LeftValues]:
    """Two of these that are not alike, in what differs between them; else nothing."""
    first, *others = some
    for other in others:
        names = [name for name in first if name in other and first[name][1] != other[name][1]]
        if names:
            return [{name: values[name] for name in names} for values in (first, other)]
    return []


def kept(model: nn.Module, values: LeftValues, where: str) -> str:
    """What is wrong with a model that reads such values in a later batch, in this layer."""
    paths = {module: path for path, module in model.named_modules()}
    names = sorted(f"{paths.get(part, '')}.{name}".strip(".") for part, name in values)
    return KEPT.format(", ".join(f"'{name}'" for name in names[:5]), where)


def _numbers(value: Any, depth: int) -> list[Any]:
    """The numbers that a value consists of, with the keys of dictionaries; else nothing."""
    if isinstance(value, _NUMBERS):
        return [value]
    if is_array(value):
        small = value.size <= MOST_ELEMENTS and not value.dtype.hasobject
        return [value.tobytes()] if small else []
    if type(value).__module__ == "numpy" and hasattr(value, "item"):  # one of its numbers
        return [value.item()]
    if not isinstance(value, (*_CONTAINERS, dict)) or not depth or len(value) > MOST_ENTRIES:
        return []
    keys: list[Any] = []
    if isinstance(value, dict):
        keys, value = list(value), value.values()
    inner = [_numbers(entry, depth - 1) for entry in value]
    if not all(inner) or not all(isinstance(key, _NUMBERS) for key in keys):
        return []
    found = [number for numbers in inner for number in numbers]
    return [*keys, *found] if found and len(found) <= MOST_ENTRIES else []
