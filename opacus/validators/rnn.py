"""Validates and replaces ``nn.RNN``."""

from __future__ import annotations

from torch import nn

from opacus.layers import DPRNN
from opacus.validators._recurrent import convert, should_replace
from opacus.validators.errors import ShouldReplaceModuleError
from opacus.validators.utils import register_module_fixer, register_module_validator


@register_module_validator(nn.RNN)
def validate(module: nn.RNN) -> list[ShouldReplaceModuleError]:
    """An error: the module has to be replaced."""
    return [should_replace(module, DPRNN)]


@register_module_fixer(nn.RNN)
def fix(module: nn.RNN) -> DPRNN:
    """An equivalent :class:`~opacus.layers.DPRNN` with copies of the weights."""
    return convert(module, DPRNN, nonlinearity=module.nonlinearity)
