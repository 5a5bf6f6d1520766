"""The description of a layer that rules use; never its parameters' values."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from opacus.core.platform.sharded import is_fsdp_class


@dataclass(frozen=True)
class LayerSpec:
    """A layer as its rule sees it.

    Attributes:
        name: Qualified name of the layer in the model, ``""`` for the root.
        kind: Class of the layer as it was written; see :func:`layer_kind`.
        params: Local names of the trainable parameters that the layer reads itself.
        shapes: Full (unsharded) shape of each of them.
        options: Static attributes that the rule asked for (stride, eps, ...).
    """

    name: str
    kind: type[nn.Module]
    params: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any]

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of the trainable parameters."""
        return sum(math.prod(self.shapes[name]) for name in self.params)

    def __str__(self) -> str:
        return f"layer '{self.name}' ({self.kind.__name__})"


def layer_kind(module: nn.Module) -> type[nn.Module]:
    """Class of a layer as it was written.

    ``fully_shard`` and ``parametrize`` replace a module's class by a subclass of it made
    at run time, which is seen through; so is a ``DistributedDataParallel`` around it.
    """
    if isinstance(module, DistributedDataParallel):
        return layer_kind(module.module)
    kind = type(module)
    while True:
        if is_fsdp_class(kind):
            kind = next(b for b in kind.__bases__ if b.__name__ != "FSDPModule")
        elif kind.__module__ == parametrize.__name__ and kind.__name__.startswith("Parametrized"):
            kind = kind.__bases__[0]
        else:
            return kind


def make_spec(
    name: str,
    module: nn.Module,
    options: Mapping[str, Any],
    others: Mapping[str, nn.Parameter] | None = None,
) -> LayerSpec:
    """The spec of ``module``, as it is now: which parameters are trainable is read here.

    Args:
        name: Qualified name of the layer in the model.
        module: The layer.
        options: What its rule asked for.
        others: Trainable parameters of parts of the layer, which its forward reads.
    """
    own = {n: p for n, p in module._parameters.items() if p is not None and p.requires_grad}
    own.update(others or {})
    shapes = {n: tuple(p.shape) for n, p in own.items()}
    return LayerSpec(name, layer_kind(module), tuple(own), shapes, options)
