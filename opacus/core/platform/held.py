"""Weak references to modules, so that results of a step do not keep its model alive."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class HeldModule:
    """A module, held weakly; a copy of this holds the module's copy."""

    __slots__ = ("_ref",)

    def __init__(self, module: nn.Module) -> None:
        self._ref = weakref.ref(module)

    def __call__(self) -> nn.Module:
        """The module.

        Raises:
            RuntimeError: It is gone.
        """
        module = self._ref()
        if module is None:
            raise RuntimeError("the private model was deleted before its backward pass had ended")
        return module

    def __reduce__(self) -> Any:
        return HeldModule, (self(),)
