"""Registration of validators and fixers of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from opacus.validators.module_validator import ModuleValidator

F = TypeVar("F", bound=Callable[..., Any])
Classes = type[nn.Module] | Iterable[type[nn.Module]]


def register_module_validator(
    target_class_or_classes: Classes,
    validator_class: type[ModuleValidator] = ModuleValidator,
) -> Callable[[F], F]:
    """Decorator: use a function to validate modules of some classes.

    The function takes a module and returns a list of exceptions, empty if all is well.

    Args:
        target_class_or_classes: Class or classes of modules.
        validator_class: Where to register the function.
    """
    return _register(validator_class.VALIDATORS, target_class_or_classes)


def register_module_fixer(
    target_class_or_classes: Classes,
    validator_class: type[ModuleValidator] = ModuleValidator,
) -> Callable[[F], F]:
    """Decorator: use a function to replace modules of some classes.

    The function takes a module, and options as keyword arguments if it has any, and
    returns another module to put in its place. It leaves the one that it was given as
    it is.

    Args:
        target_class_or_classes: Class or classes of modules.
        validator_class: Where to register the function.
    """
    return _register(validator_class.FIXERS, target_class_or_classes)


def _register(table: dict[type[nn.Module], Any], classes: Classes) -> Callable[[F], F]:
    targets = [classes] if isinstance(classes, type) else list(classes)

    def decorator(function: F) -> F:
        table.update(dict.fromkeys(targets, function))
        return function

    return decorator
