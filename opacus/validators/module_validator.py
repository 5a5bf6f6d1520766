"""Finds modules that cannot be trained privately, and replaces those it can.

Note [Classes and subclasses]
    A validator is meant for a class and whatever derives from it: a subclass of
    ``nn.BatchNorm2d`` normalises over the batch too. A fixer only replaces a subclass
    that computes what its base does, that is one with the same ``forward``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from opacus.core.rules.mixing import mixes_samples
from opacus.utils.module_utils import clone_module, requires_grad
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.tying import Ties

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


class ModuleValidator:
    """Checks that a model can be trained privately; replaces layers so that it can.

    Attributes:
        VALIDATORS: Module class -> function that returns what is wrong with a module.
        FIXERS: Module class -> function that returns a replacement for a module.
    """

    VALIDATORS: ClassVar[dict[type[nn.Module], Callable[..., list[Exception]]]] = {}
    FIXERS: ClassVar[dict[type[nn.Module], Callable[..., nn.Module]]] = {}

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[Exception]:
        """Find everything in ``module`` that cannot be trained with differential privacy.

        Modules without trainable parameters are passed over, as their gradients are not
        needed, but for norms that mix samples all the same: a BatchNorm that normalises by
        the batch lets samples into each other's gradients, and keeps statistics of them
        without noise. A frozen one in eval mode, with running statistics, is fine.

        Args:
            module: The model, in training mode.
            strict: Whether to raise what is found instead of returning it.

        Returns:
            One error for each thing wrong, which names the module. Empty if all is well.

        Raises:
            UnsupportedModuleError: ``strict`` is set and something was found; it has all
                the errors in its attribute ``errors``.
        """
        errors: list[Exception] = []
        if not module.training:
            errors.append(
                IllegalModuleConfigurationError(
                    "the model must be in training mode, call model.train() first"
                )
            )
        for name, submodule in module.named_modules():
            validator = _lookup(cls.VALIDATORS, submodule)
            if validator is not None and _matters(submodule):
                errors += [_named(error, name, submodule) for error in validator(submodule)]
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether :meth:`validate` finds nothing wrong with ``module``."""
        return not cls.validate(module, strict=False)

    @classmethod
    def fix(cls, module: M, **kwargs: Any) -> M:
        """A copy of ``module`` in which layers are replaced by ones that can be private.

        LSTM, GRU, RNN and MultiheadAttention become equivalent layers with the same
        weights; BatchNorm becomes GroupNorm, which computes something else and starts
        afresh. A BatchNorm whose parameters are all frozen and which has running statistics
        stays: put it in eval mode. Device, dtype, training mode, ``requires_grad`` and which
        parameters are tied to each other are kept. Build the optimizer afterwards, on the copy.

        Args:
            module: The model; left as it is.
            kwargs: Options of the fixers: ``replace_bn_with_in=True`` for InstanceNorm in
                place of BatchNorm; ``num_groups`` of the GroupNorms.

        Returns:
            The copy. What no fixer is known for is still in it.

        Raises:
            TypeError: No fixer has such an option.
            ValueError: A layer is not initialised yet, options contradict each other, or a tie
                cannot be kept.
        """
        cls._check_options(kwargs)
        lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
        lazy = lazy or [n for n, m in module.named_modules() if isinstance(m, LazyModuleMixin)]
        if lazy:
            raise ValueError(f"{lazy} have no values yet; run the model once before it is fixed")
        clone = clone_module(module)
        ties = Ties(clone)
        replaced: dict[nn.Module, nn.Module] = {}
        inside: set[nn.Module] = set()
        for name, submodule in list(clone.named_modules(remove_duplicate=False)):
            if submodule not in replaced:
                new = None if submodule in inside else cls._fixed(name, submodule, kwargs)
                if new is None:
                    continue
                replaced[submodule] = new
                inside.update(submodule.modules())
            if not name:
                clone = replaced[submodule]  # type: ignore[assignment]  # the model itself
                continue
            path, _, local = name.rpartition(".")
            setattr(clone.get_submodule(path), local, replaced[submodule])
        ties.restore(replaced)
        return clone

    @classmethod
    def fix_and_validate(cls, module: M, **kwargs: Any) -> M:
        """:meth:`fix`, then :meth:`validate` strictly.

        Args:
            module: The model; left as it is.
            kwargs: Options of the fixers, see :meth:`fix`.

        Raises:
            UnsupportedModuleError: Something is wrong that could not be fixed.
        """
        fixed = cls.fix(module, **kwargs)
        cls.validate(fixed, strict=True)
        return fixed

    @classmethod
    def _fixed(cls, name: str, module: nn.Module, options: Mapping[str, Any]) -> nn.Module | None:
        """What to put in the place of ``module``, if it needs replacing."""
        fixer = _lookup(cls.FIXERS, module, same_forward=True)
        if fixer is None or is_parametrized(module):
            return None
        if not _matters(module) or _is_frozen_for_eval(module):
            return None
        new = fixer(module, **{k: v for k, v in options.items() if _takes(fixer, k)})
        if new is module:
            return None
        logger.info("Replaced sub_module '%s' : %s with %s", name, module, new)
        return new.train(module.training)

    @classmethod
    def _check_options(cls, options: Mapping[str, Any]) -> None:
        for option in options:
            if not any(_takes(fixer, option) for fixer in cls.FIXERS.values()):
                raise TypeError(f"fix() got an option that no fixer has: '{option}'")


def _lookup(
    table: Mapping[type[nn.Module], T], module: nn.Module, *, same_forward: bool = False
) -> T | None:
    """The entry for the class of ``module`` or its nearest base; see the Note above."""
    kind = getattr(module, "cls_to_become", None) or type(module)  # modules that are still lazy
    for base in kind.__mro__:
        if base in table:
            unchanged = getattr(kind, "forward", None) is getattr(base, "forward", None)
            return table[base] if unchanged or not same_forward else None
    return None


def _named(error: Exception, name: str, module: nn.Module) -> Exception:
    """``error`` with a message that starts with the name of the module."""
    message, *rest = error.args or ("",)
    error.args = (f"{_shown(name, module)}: {message}", *rest)
    return error


def _shown(name: str, module: nn.Module) -> str:
    return f"{repr(name) if name else 'the model itself'} ({type(module).__name__})"


def _matters(module: nn.Module) -> bool:
    """Whether the module is trained, or mixes samples without being trained."""
    return requires_grad(module, recurse=True) or mixes_samples(module)


def _is_frozen_for_eval(module: nn.Module) -> bool:
    """Whether eval mode solves it: the module has learned statistics that remain usable."""
    parameters = list(module.parameters())
    frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
    return frozen and isinstance(module, _BatchNorm) and module.running_mean is not None


def _takes(function: Callable[..., Any], option: str) -> bool:
    """Whether ``option`` is a keyword argument of ``function``, or may be for all we know."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return option in named or (not named and any(p.kind is p.VAR_KEYWORD for p in parameters))
