"""What runs of a model leave in plain attributes: numbers, lists of them, NumPy's arrays.

No trail follows these. A model that reads them in a later batch trains on samples of this one.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.attributes import MOST_ELEMENTS, attributes_of, is_array
from opacus.core.record.kept_values import held

# Entries of a container, with those in containers in it, and levels of these.
MOST_ENTRIES, DEPTH = 4096, 3
KEPT = (
    "what the model keeps of samples in {} changes the gradients of samples of a later batch, "
    "first at {}. Compute it from each sample alone"
)
_NUMBERS = (bool, int, float, complex)
_CONTAINERS = (list, tuple, set, deque)

# The attribute of a module; a copy of its value, and the numbers in it as text.
Left = dict[tuple[nn.Module, str], tuple[Any, str]]


def left_values(model: nn.Module) -> Left:
    """Copies of all attributes of a model and its parts that hold numbers alone."""
    return {
        (part, name): (copy.deepcopy(value), repr(numbers))
        for part in model.modules()
        for name, value in attributes_of(part).items()
        if (numbers := _numbers(value, DEPTH))
    }


def put_values(values: Left) -> None:
    """Let the modules have these."""
    for (part, name), (value, _) in values.items():
        vars(part)[name] = copy.deepcopy(value)


def that_differ(some: Iterable[Left]) -> list[Left]:
    """Two of these that are not alike, in what differs between them; else nothing."""
    first, *others = some
    for other in others:
        names = [name for name in first if name in other and first[name][1] != other[name][1]]
        if names:
            return [{name: values[name] for name in names} for values in (first, other)]
    return []


def held_tensors(model: nn.Module) -> dict[tuple[str, int], tuple[Tensor, int]]:
    """What modules hold in buffers, parameters and attributes, and in which version."""
    found: dict[tuple[str, int], tuple[Tensor, int]] = {}
    for name, tensor in held(model):
        number = next(n for n in itertools.count() if (name, n) not in found)
        found[name, number] = tensor, -1 if tensor.is_inference() else tensor._version
    return found


def changed_tensors(model: nn.Module, before: Any) -> dict[tuple[str, int], Any]:
    """Of what a run has changed since then, what tells values apart."""
    changed: dict[tuple[str, int], Any] = {}
    for place, (tensor, version) in held_tensors(model).items():
        old, then = before.get(place, (None, -1))
        if tensor is not old or version != then:
            wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
            sums = [wide.sum(), wide.abs().sum(), (wide * wide.abs()).sum()]
            changed[place] = tuple(tensor.shape), [str(one.item()) for one in sums]
    return changed


def depend_on_samples(some: Iterable[dict[tuple[str, int], Any]]) -> set[str]:
    """Names of what is not alike in these, each of a run on another sample."""
    first, *others = some
    places = set(first).union(*others)
    return {name for name, n in places for x in others if x.get((name, n)) != first.get((name, n))}


def kept(model: nn.Module, values: Left, where: str) -> str:
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
    if not all(inner) or not all(isinstance(key, (str, *_NUMBERS)) for key in keys):
        return []
    found = [number for numbers in inner for number in numbers]
    return [*keys, *found] if found and len(found) <= MOST_ENTRIES else []
