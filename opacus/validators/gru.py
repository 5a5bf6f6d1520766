"""Validates and replaces ``nn.GRU``."""

from __future__ import annotations

from torch import nn

from opacus.layers import DPGRU
from opacus.validators._recurrent import convert, should_replace
from opacus.validators.errors import ShouldReplaceModuleError
from opacus.validators.utils import register_module_fixer, register_module_validator


@register_module_validator(nn.GRU)
def validate(module: nn.GRU) -> list[ShouldReplaceModuleError]:
    """An error: the module has to be replaced."""
    return [should_replace(module, DPGRU)]


@register_module_fixer(nn.GRU)
def fix(module: nn.GRU) -> DPGRU:
    """An equivalent :class:`~opacus.layers.DPGRU` with copies of the weights."""
    return convert(module, DPGRU)
