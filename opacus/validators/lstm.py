"""Validates and replaces ``nn.LSTM``."""

from __future__ import annotations

from torch import nn

from opacus.layers import DPLSTM
from opacus.validators._recurrent import convert, should_replace
from opacus.validators.errors import ShouldReplaceModuleError
from opacus.validators.utils import register_module_fixer, register_module_validator


@register_module_validator(nn.LSTM)
def validate(module: nn.LSTM) -> list[ShouldReplaceModuleError]:
    """An error: the module has to be replaced."""
    return [should_replace(module, DPLSTM)]


@register_module_fixer(nn.LSTM)
def fix(module: nn.LSTM) -> DPLSTM:
    """An equivalent :class:`~opacus.layers.DPLSTM` with copies of the weights."""
    return convert(module, DPLSTM)
