"""Methods of Opacus' hooks that are not part of a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.rules.mixing import mixes_samples
from opacus.grad_sample._held import HeldParameters


class OpacusNames(HeldParameters):
    """The part of the hooks that only Opacus' users call."""

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Modules below ``module`` (itself included) that own trainable parameters."""
        for submodule in module.modules():
            if any(p.requires_grad for p in submodule.parameters(recurse=False)):
                yield submodule

    def capture_activations_hook(
        self, module: nn.Module, forward_input: Any, _forward_output: Any
    ) -> Any:
        """Tap the output of one layer; returns the output to go on with."""
        for layer in self._recorder.layers:
            if layer.module is module and self._recorder.active(module):
                return self._recorder.tap(layer, tuple(forward_input), {}, _forward_output)
        return _forward_output

    def rearrange_grad_samples(
        self, *, module: nn.Module, backprops: Tensor, loss_reduction: str, batch_first: bool
    ) -> Tensor:
        """Backprops with the batch first and without the factor 1/B of a mean loss."""
        if not batch_first and backprops.dim() > 1:
            backprops = backprops.transpose(0, 1)
        if loss_reduction == "mean":
            backprops = backprops * backprops.shape[0]
        elif loss_reduction != "sum":
            raise ValueError(
                f"loss_reduction = {loss_reduction!r}. Only 'sum' and 'mean' losses are supported"
            )
        return backprops

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Deprecated: every layer is supported, by the generic rule if by no other."""
        warnings.warn(
            "GradSampleModule.is_supported is deprecated: every layer is supported.",
            DeprecationWarning,
            stacklevel=2,
        )
        return True

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Modules that share statistics between samples, which no clipping can undo.

        A frozen BatchNorm in eval mode, with running statistics, does not.

        Args:
            module: The module to check.
            strict: Raise instead of returning the errors.

        Raises:
            NotImplementedError: ``strict`` and there are errors; it names the modules.
        """
        errors = [
            NotImplementedError(
                f"Model contains a layer that mixes samples or keeps statistics of them "
                f"({name}: {submodule}); use ModuleValidator.fix(model) to replace it, or, if it "
                "is frozen, put it in eval mode"
            )
            for name, submodule in module.named_modules()
            if _mixes_samples(submodule)
        ]
        if strict and errors:
            raise NotImplementedError(errors)
        return errors


def _mixes_samples(module: nn.Module) -> bool:
    """Whether a layer mixes samples, now or, if it is trained, in train mode."""
    if mixes_samples(module):
        return True
    batch_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    tracking = isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)
    trainable = any(p.requires_grad for p in module.parameters(recurse=False))
    return trainable and (batch_norm or (tracking and bool(module.track_running_stats)))
