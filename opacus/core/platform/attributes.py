"""What modules hold besides parameters, buffers and parts, to run them as they were."""

from __future__ import annotations

import operator
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opacus.core.platform.trees import tensors_of

# Those of every module, and those of private ones, through which they hold the whole model.
_OWN = {*vars(nn.Module()), "ft_compute_sample_grad", "autograd_grad_sample_hooks"}
# Elements of an array that are copied.
MOST_ELEMENTS = 1 << 20
_CONTAINERS = (list, dict, set, deque)


class Attributes:
    """The attributes of a module and its parts at one moment.

    Of lists, dictionaries, sets, queues and NumPy's arrays the entries, too. What is changed in
    place in a tensor, or in a list within a list, stays changed.

    Args:
        module: Held weakly, with its parts.
        tensors: Only those that are or hold tensors, like states; others that modules get as they
            run for the first time (whether hooks are installed, say) then stay. What DDP holds
            stays, too: whether it broadcasts is no state of the model.
    """

    def __init__(self, module: nn.Module, *, tensors: bool = False) -> None:
        self._tensors = tensors
        self._values = [(weakref.ref(part), attributes_of(part)) for part in module.modules()]
        if tensors:
            self._values = [
                (part, {name: value for name, value in values.items() if tensors_of(value)})
                for part, values in self._values
                if not isinstance(part(), DistributedDataParallel)
            ]
        self._entries = [
            (value, list(value.items() if isinstance(value, dict) else value))
            for _, values in self._values
            for value in values.values()
            if isinstance(value, _CONTAINERS)
        ]
        self._arrays = [
            (value, value.copy())
            for _, values in self._values
            for value in values.values()
            if is_array(value) and value.size <= MOST_ELEMENTS and value.flags.writeable
        ]

    def __reduce__(self) -> tuple[type[Attributes], tuple[nn.Module]]:
        return Attributes, (nn.Module(),)  # a copy of a model has not run

    def put_back(self) -> None:
        """The modules have them again."""
        for part, values in self._values:
            module = part()
            if module is not None:
                new = () if self._tensors else attributes_of(module).keys() - values.keys()
                for name in new:
                    del module.__dict__[name]
                module.__dict__.update(values)
        for value, entries in self._entries:
            fill(value, entries)
        for array, values in self._arrays:
            array[...] = values


@contextmanager
def same_attributes(module: nn.Module, started_from: Attributes | None = None) -> Iterator[None]:
    """Afterwards the attributes are as before; inside as ``started_from``, if that is given."""
    before = Attributes(module)
    if started_from is not None:
        started_from.put_back()
    try:
        yield
    finally:
        before.put_back()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Those of a module that are its own."""
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def is_array(value: Any) -> bool:
    """Whether it is one of NumPy, which need not be there."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def fill(value: Any, entries: list[Any]) -> None:
    """Let a container have these entries, of a dictionary names and values."""
    now = list(value.items() if isinstance(value, dict) else value)
    if len(now) == len(entries) and all(map(_same, now, entries)):
        return
    value.clear()
    (value.update if isinstance(value, (dict, set)) else value.extend)(entries)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, tuple) and isinstance(two, tuple):  # entries of a dictionary
        return len(one) == len(two) and all(map(operator.is_, one, two))
    return one is two
