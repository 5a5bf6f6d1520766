"""Validates linear layers: those of torchao in float8 may let samples into each other."""

from __future__ import annotations

from torch import nn

from opacus.core.rules.float8 import coupled_by_scales
from opacus.validators.errors import IllegalModuleConfigurationError
from opacus.validators.utils import register_module_validator


@register_module_validator(nn.Linear)
def validate(module: nn.Linear) -> list[IllegalModuleConfigurationError]:
    """An error if scales of float8 are common to the samples of a batch."""
    wrong = coupled_by_scales(module)
    return [] if wrong is None else [IllegalModuleConfigurationError(wrong)]
