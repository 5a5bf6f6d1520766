"""What the schema of an operation says of its arguments, and where values leave torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Reads(TorchFunctionMode):
    """Notices that values leave torch: what is done with them no operation shows.

    Attributes:
        looked: Whether any have.
    """

    looked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            self.looked = True
        return func(*args, **(kwargs or {}))


_READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))


def name_of(schema: Any) -> tuple[str, bool]:
    """Name of an operation, whatever its variant, and whether it changes its first argument."""
    space, _, name = schema.name.partition("::")
    name = name if space == "aten" else schema.name
    first = schema.arguments[0] if schema.arguments else None
    in_place = name.endswith("_") and first is not None and is_written(first)
    return (name[:-1] if in_place else name), in_place


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Whether an operation is elementwise, of which torch tags some variants only."""
    space, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    variants = [] if packet is None else [getattr(packet, v) for v in packet.overloads()]
    return any(torch.Tag.pointwise in variant.tags for variant in [func, *variants])


def is_view(schema: Any) -> bool:
    """Whether the result of an operation is a view of an argument."""
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def is_written(argument: Any) -> bool:
    """Whether an operation writes to an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def bound(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, in their order, with the defaults of those that are left out."""
    values = dict(zip((a.name for a in schema.arguments), args, strict=False))
    for argument in schema.arguments[len(args) :]:
        if argument.name in kwargs or argument.has_default_value():
            values[argument.name] = kwargs.get(argument.name, argument.default_value)
    return values
