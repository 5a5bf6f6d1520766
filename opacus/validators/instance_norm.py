"""Validates ``nn.InstanceNorm*d``, and makes it stop keeping statistics."""

from __future__ import annotations

from typing import Union

from torch import nn

from opacus.utils.module_utils import clone_module
from opacus.validators.errors import IllegalModuleConfigurationError
from opacus.validators.utils import register_module_fixer, register_module_validator

INSTANCENORM = Union[nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]  # noqa: UP007
_CLASSES = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]


@register_module_validator(_CLASSES)
def validate(module: INSTANCENORM) -> list[IllegalModuleConfigurationError]:
    """An error if the module keeps running statistics."""
    if not module.track_running_stats:
        return []
    return [
        IllegalModuleConfigurationError(
            "track_running_stats=True keeps averages of private data in the model, without "
            "noise; ModuleValidator.fix() switches it off"
        )
    ]


@register_module_fixer(_CLASSES)
def fix(module: INSTANCENORM) -> INSTANCENORM:
    """A copy without running statistics; the module itself if it keeps none."""
    if not module.track_running_stats:
        return module
    fixed = clone_module(module)
    fixed.track_running_stats = False
    fixed.running_mean = fixed.running_var = fixed.num_batches_tracked = None
    return fixed
