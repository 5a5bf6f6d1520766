"""Base classes of everything that gives a model per-sample gradients."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from opacus.core.isolation.check import Isolation
from opacus.core.platform.allocator import keep_freed_memory
from opacus.core.platform.profiling import PROFILE
from opacus.core.privacy.unit_names import UnitNames

# Attributes that appear on parameters while a model is private; all of them are gone
# after cleanup().
OPACUS_PARAM_MONKEYPATCH_ATTRS = [
    "grad_sample",
    "_forward_counter",
    "_current_grad_sample",
    "_norm_sample",
]

ONLY_BK = "only the _bk modes keep records or gradients for the sum, see docs/modes.md"

logger = logging.getLogger(__name__)


class OfOtherModes:
    """A setting that this mode has no use for.

    Args:
        why: What a :class:`ValueError` says, unless it is set to ``None``.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: object | None, kind: type) -> Any:
        if owner is None:
            return self
        raise AttributeError(f"{self._name}: {self._why}")

    def __set__(self, owner: object, value: Any) -> None:
        if value is not None:
            raise ValueError(f"{self._name}: {self._why}")


def say_what_is_unheld(names: Sequence[str]) -> None:
    """Warn of trainable parameters that the optimizer does not hold."""
    if names:
        logger.warning(
            "The optimizer does not hold %d trainable parameters (%s, ...). They are not "
            "trained, so they count as frozen: they are not clipped, and are in no norm. Freeze "
            "them (requires_grad_(False)) to say so, and let no other optimizer use their "
            "gradients, which get no noise.",
            len(names),
            ", ".join(names[:5]),
        )


class AbstractGradSampleHooks(ABC):
    """Gives the parameters of a module per-sample gradients, without wrapping it.

    Args:
        m: The module.
        batch_first: Whether activations have the batch in dimension 0 (else in 1).
        loss_reduction: ``"mean"`` or ``"sum"``, how the loss is reduced over samples.

    Attributes:
        isolation: Checks that samples do not depend on each other, where layers are recorded.
        _unit_names: Of the units of a step's batches, where the user names them for good.
        _untapped: Names and parameters that no tapped layer has: frozen when hooks were added.

    Raises:
        ValueError: ``loss_reduction`` is neither.
    """

    # Here, so that a wrapped module's attributes of these names are not taken for them.
    isolation: Isolation | None = None
    _unit_names: UnitNames | None = None
    _untapped: Sequence[tuple[str, nn.Parameter]] = ()

    held_budget: Any = OfOtherModes(ONLY_BK)
    memory_budget: Any = OfOtherModes(ONLY_BK)
    host_budget: Any = OfOtherModes(ONLY_BK)
    stored_dtype: Any = OfOtherModes(ONLY_BK)
    deferred_norm_budget: Any = OfOtherModes("only ghost modes defer norms, see docs/modes.md")

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction = {loss_reduction!r}. Only 'sum' and 'mean' losses are supported"
            )
        PROFILE.configure()
        keep_freed_memory()
        super().__init__()
        self._module = m
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        for parameter in m.parameters():
            if parameter.requires_grad:
                parameter.grad_sample = None  # type: ignore[attr-defined]
                parameter._forward_counter = 0  # type: ignore[attr-defined]

    def set_grad_sample_to_none(self) -> None:
        """Set ``grad_sample`` of every parameter to ``None``."""
        for parameter in self._module.parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]

    def del_grad_sample(self) -> None:
        """Delete the attribute ``grad_sample`` of every parameter."""
        for parameter in self._module.parameters():
            if hasattr(parameter, "grad_sample"):
                del parameter.grad_sample

    def forbid_grad_accumulation(self) -> None:  # noqa: B027 (optional in subclasses)
        """Make a second backward pass without ``zero_grad`` between an error."""

    def allow_grad_accumulation(self) -> None:  # noqa: B027 (optional in subclasses)
        """Let several backward passes accumulate (not sound with Poisson sampling)."""

    def hold_only(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027 (optional)
        """Record these parameters alone: an optimizer holds them, so it clips them."""

    @abstractmethod
    def remove_hooks(self) -> None:
        """Take every hook off the module."""

    def cleanup(self) -> None:
        """Remove the hooks and every attribute that was put on parameters."""
        try:
            self.remove_hooks()
        finally:
            self._let_optimizer_go()
            for parameter in self._module.parameters():
                for attribute in OPACUS_PARAM_MONKEYPATCH_ATTRS:
                    if hasattr(parameter, attribute):
                        delattr(parameter, attribute)

    def _let_optimizer_go(self) -> None:
        """What it has not released is dropped: after this nothing tells that it is private."""
        isolation = self.isolation
        if isolation is not None and isolation.optimizer is not None:
            isolation.optimizer.let_go()
            isolation.optimizer = None


class AbstractGradSampleModule(nn.Module, AbstractGradSampleHooks, ABC):
    """The same as a wrapper module: ``forward`` and attributes are the wrapped module's.

    Args:
        m: The module to wrap; it stays reachable as ``_module``.
        batch_first: See :class:`AbstractGradSampleHooks`.
        loss_reduction: See :class:`AbstractGradSampleHooks`.
    """

    privacy_unit: str | None = None

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"
    ) -> None:
        nn.Module.__init__(self)
        AbstractGradSampleHooks.__init__(
            self, m, batch_first=batch_first, loss_reduction=loss_reduction
        )
        self.grad_accumulation_hook: RemovableHandle | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module.

        Raises:
            RuntimeError: What the module raised; for an empty batch it says what to change, and
                so it does where a layer's output got a row for each sample.
        """
        if self._untapped:
            self._follow_unfreezing()
        if self.privacy_unit is not None:
            args, kwargs = self._name_units(args, kwargs)
        try:
            return self._run(*args, **kwargs)
        except RuntimeError as error:
            if "tensor of 0 elements" not in str(error):
                self._explain(error)
                raise
            raise RuntimeError(
                f"the model fails on an empty batch, which Poisson sampling may draw: {error}. In "
                "its forward write x.flatten(1) instead of x.view(len(x), -1), or pass "
                "rand_on_empty=True to make_private"
            ) from error

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def _follow_unfreezing(self) -> None:
        """Record parameters made trainable since the last forward pass; nothing here."""

    def _explain(self, error: RuntimeError) -> None:
        """Raise the likely cause of an error in the module's forward; nothing here."""

    def _name_units(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Remove arguments that are not the model's; nothing here."""
        return args, kwargs

    def __getattr__(self, item: str) -> Any:
        try:
            return super().__getattr__(item)
        except AttributeError:
            if item == "_module" or "_modules" not in self.__dict__:
                raise
            own = getattr(type(self), item, None)
            if isinstance(own, property):  # Python came here from its error, which says why
                return own.__get__(self)
            module: Any = super().__getattr__("_module")
        if "." in item:
            return module.get_submodule(item)
        try:
            return getattr(module, item)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__!r} nor the wrapped {type(module).__name__!r} "
                f"has an attribute {item!r}"
            ) from None

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear ``grad`` and ``grad_sample`` of all parameters.

        Args:
            set_to_none: Set ``grad`` to ``None`` rather than to zero. Per-sample
                gradients always become ``None``: their number changes from batch to batch.
        """
        self.set_grad_sample_to_none()
        super().zero_grad(set_to_none)

    def to_standard_module(self) -> nn.Module:
        """The wrapped module, freed of hooks and of attributes on its parameters."""
        self._close()
        return self._module

    def _close(self) -> None:
        self.cleanup()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"
