"""What can be wrong with a module that is to be trained privately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UnsupportedError(ValueError):
    """Something cannot be trained with differential privacy."""


class UnsupportedModuleError(UnsupportedError):
    """A module, or several, cannot be trained with differential privacy.

    Args:
        args: The message; or the list of what was found in a model.

    Attributes:
        errors: That list; the error itself if it is about one module.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        found = args[0] if args and isinstance(args[0], (list, tuple)) else [self]
        self.errors: Sequence[Exception] = list(found)

    def __str__(self) -> str:
        if self.errors and self.errors[0] is not self:
            lines = "".join(f"\n  - {error}" for error in self.errors)
            return f"the model cannot be trained with differential privacy:{lines}"
        return super().__str__()


class ShouldReplaceModuleError(UnsupportedModuleError):
    """The module has an equivalent that works: ``ModuleValidator.fix`` puts it there."""


class UnsupportableModuleError(UnsupportedModuleError):
    """The module cannot be made private, whatever is done about it."""


class NotYetSupportedModuleError(UnsupportedModuleError):
    """The module could be made private, but there is no implementation yet."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """The module works, but not the way it is set up."""
