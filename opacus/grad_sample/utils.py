"""Registers samplers, and picks and builds the classes of a grad sample mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from opacus.core.step.auto import chosen_for
from opacus.core.step.modes import AUTO, mode_of
from opacus.grad_sample._samplers import Sampler
from opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_tp import (
    GradSampleHooksFastGradientClippingTP,
    GradSampleModuleFastGradientClippingTP,
)
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.grad_sample.gsm_no_op import GradSampleHooksNoOp, GradSampleModuleNoOp

_Classes = type[nn.Module] | Sequence[type[nn.Module]]


def register_grad_sampler(target_class_or_classes: _Classes) -> Callable[[Sampler], Sampler]:
    """Decorator: use the function to compute per-sample gradients of these layers.

    The function takes ``(layer, activations, backprops)``, a list of inputs ``[B, ...]`` and the
    gradient ``[B, ...]`` of the output, and returns ``{parameter: [B, *parameter.shape]}``.
    ``backprops`` belong to the sum of the samples' losses. Applies to models made private after
    the registration. Wrong gradients are clipped wrongly: compare the function with one sample at a
    time by ``opacus.utils.per_sample_gradients_utils.check_per_sample_gradients_are_correct``.

    Args:
        target_class_or_classes: Layer class or classes; subclasses are not included.

    Raises:
        ValueError: In the backward pass, if what it returned has another shape.
    """

    def register(function: Sampler) -> Sampler:
        for target in _as_classes(target_class_or_classes):
            GradSampleHooks.GRAD_SAMPLERS[target] = function
        return function

    return register


def register_norm_sampler(target_class_or_classes: _Classes) -> Callable[[Sampler], Sampler]:
    """Decorator: use the function to compute per-sample gradient norms of these layers.

    Like :func:`register_grad_sampler`, but returns ``{parameter: [B] norms}``; used in
    ghost modes.

    Args:
        target_class_or_classes: Layer class or classes; subclasses are not included.
    """

    def register(function: Sampler) -> Sampler:
        for target in _as_classes(target_class_or_classes):
            GradSampleHooksFastGradientClipping.NORM_SAMPLERS[target] = function
        return function

    return register


def get_gsm_class(grad_sample_mode: str) -> type[AbstractGradSampleModule]:
    """The wrapper class of a grad sample mode.

    Raises:
        ValueError: Unknown mode, or one whose class is not there.
    """
    return _classes_of(grad_sample_mode)[1]


def get_hooks_class(grad_sample_mode: str) -> type[AbstractGradSampleHooks]:
    """The hooks class of a grad sample mode, for models that are not wrapped.

    Raises:
        ValueError: Unknown mode, or one that works by wrapping only.
    """
    hooks = _classes_of(grad_sample_mode)[0]
    if hooks is None:
        raise ValueError(f"grad_sample_mode {grad_sample_mode!r} needs wrap_model=True")
    return hooks


def wrap_model(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *args: Any, **kwargs: Any
) -> Any:
    """Give a model per-sample gradients.

    Args:
        model: The model.
        grad_sample_mode: One of the modes in ``opacus.core.step.modes.MODES``, or ``"auto"``.
        wrap_model: Return a wrapper module (``True``) or a hooks object (``False``).
        args: Positional arguments of the class.
        kwargs: Keyword arguments of the class.
    """
    if grad_sample_mode == AUTO:
        choice = chosen_for(model)
        private = _wrap(model, choice.mode, wrap_model, *args, **kwargs)
        private.auto_choice = choice
        return private
    cls: Any = get_gsm_class(grad_sample_mode) if wrap_model else get_hooks_class(grad_sample_mode)
    mode = mode_of(grad_sample_mode)
    if mode.samples == "vmap":
        kwargs["force_functorch"] = True
    if mode.strategy == "one_pass":
        kwargs["book_keeping"] = True
    if mode.kernels != "reference":
        kwargs["kernels"] = mode.kernels
    return cls(model, *args, **kwargs)


def prepare_module(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *args: Any, **kwargs: Any
) -> Any:
    """The same as :func:`wrap_model`."""
    return _wrap(model, grad_sample_mode, wrap_model, *args, **kwargs)


_wrap = wrap_model


def _classes_of(
    grad_sample_mode: str,
) -> tuple[type[AbstractGradSampleHooks] | None, type[AbstractGradSampleModule]]:
    mode = mode_of(grad_sample_mode)
    if mode.samples == "user":
        return GradSampleHooksNoOp, GradSampleModuleNoOp
    if mode.samples == "expanded_weights":
        return None, GradSampleModuleExpandedWeights
    if mode.strategy == "materialise" and mode.samples in ("rules", "vmap"):
        return GradSampleHooks, GradSampleModule
    if mode.needs_criterion and mode.parallelism == "any":
        return GradSampleHooksFastGradientClipping, GradSampleModuleFastGradientClipping
    if mode.needs_criterion and mode.parallelism == "fsdp":
        return GradSampleHooksFastGradientClippingFSDP, GradSampleModuleFastGradientClippingFSDP
    return GradSampleHooksFastGradientClippingTP, GradSampleModuleFastGradientClippingTP


def _as_classes(classes: _Classes) -> Sequence[type[nn.Module]]:
    return [classes] if isinstance(classes, type) else list(classes)
