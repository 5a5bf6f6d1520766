"""What the rules need to know about a layer; never its parameters' values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from opacus.core.sharded import is_fsdp_class


@dataclass(frozen=True)
class LayerSpec:
    """A layer as its rule sees it.

    Attributes:
        name: Qualified name of the layer in the model, ``""`` for the root.
        kind: Class of the layer, seen through FSDP2's class swap.
        params: Local names of the trainable parameters that the layer owns directly.
        shapes: Full (unsharded) shape of each of them.
        options: Static attributes that the rule asked for (stride, eps, ...).
    """

    name: str
    kind: type[nn.Module]
    params: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return f"layer '{self.name}' ({self.kind.__name__})"


def layer_kind(module: nn.Module) -> type[nn.Module]:
    """Class of a layer as it was written.

    ``fully_shard`` replaces the class by a subclass of ``FSDPModule`` and the original
    one; the first base that is not FSDP's is the original.
    """
    kind = type(module)
    while is_fsdp_class(kind):
        kind = next(b for b in kind.__bases__ if b.__name__ != "FSDPModule")
    return kind


def make_spec(name: str, module: nn.Module, options: Mapping[str, Any]) -> LayerSpec:
    """The spec of ``module``, as it is now: which parameters are trainable is read here."""
    own = {n: p for n, p in module._parameters.items() if p is not None and p.requires_grad}
    shapes = {n: tuple(p.shape) for n, p in own.items()}
    return LayerSpec(name, layer_kind(module), tuple(own), shapes, options)
