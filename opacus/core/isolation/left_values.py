"""What runs of a model leave in it that no trail has seen them write.

Numbers in plain attributes, text, lists of them and NumPy's arrays are never followed: a model that
reads them in a later batch trains on samples of this one. A tensor that is written to past torch's
operations, or as a number says that the model has looked at, seems to be nobody's; where runs on
two samples leave other values in it, it is theirs, and later passes are followed accordingly.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.attributes import MOST_ELEMENTS, attributes_of, is_array
from opacus.core.record.kept_values import held_tensors

# Entries of a container, with those in containers in it, and levels of these.
MOST_ENTRIES, DEPTH = 4096, 3
# Elements of a tensor that is copied.
MOST_COPIED = 1 << 16
KEPT = (
    "what the model keeps of samples in {} changes the gradients of samples of a later batch, "
    "first at {}. Compute it from each sample alone"
)
_NUMBERS = (bool, int, float, complex, str)
_CONTAINERS = (list, tuple, set, deque)

# The attribute of a module; a copy of its value, and the numbers in it as text.
LeftValues = dict[tuple[nn.Module, str], tuple[Any, str]]
# Copies of tensors, by the name of what holds them.
LeftTensors = dict[str, list[Tensor]]


HIDDEN = (
    "it gives the same samples other gradients when it runs again, though it draws no random "
    "numbers that programs share. Either it has a generator of its own, or it keeps something of "
    "samples where nothing finds it (a global variable, a closure, an attribute of a class or of "
    "an object that is no module), which no clipping bounds: keep nothing"
)


class Remains:
    """What a run of a model has left in it.

    Attributes:
        values: In attributes, of all sorts but tensors.
        tensors: That it holds besides its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.values = left_values(model)
        self.tensors = left_tensors(model)


def left_values(model: nn.Module) -> LeftValues:
    """Copies of all attributes of a model and its parts that hold numbers alone."""
    return {
        (part, name): (copy.deepcopy(value), repr(numbers))
        for part in model.modules()
        for name, value in attributes_of(part).items()
        if (numbers := _numbers(value, DEPTH))
    }


def left_tensors(model: nn.Module) -> LeftTensors:
    """Copies of the small tensors that a model holds besides its parameters."""
    found: LeftTensors = {}
    for name, tensor in held_tensors(model):
        if not isinstance(tensor, nn.Parameter) and tensor.numel() <= MOST_COPIED:
            found.setdefault(name, []).append(tensor.detach().clone())
    return found


def tensors_that_differ(some: Iterable[LeftTensors]) -> set[str]:
    """The names of those that are not alike in all of these."""
    first, *others = some
    return {
        name
        for other in others
        for name in first.keys() & other.keys()
        if not _alike(first[name], other[name])
    }


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


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
