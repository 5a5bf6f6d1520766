"""Checks whether models can be trained privately, and replaces layers that cannot."""

from opacus.validators import (
    batch_norm,
    gru,
    instance_norm,
    linear,
    lstm,
    multihead_attention,
    rnn,
)
from opacus.validators.module_validator import ModuleValidator
from opacus.validators.multihead_attention import fix, validate
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = [
    "ModuleValidator",
    "batch_norm",
    "fix",
    "gru",
    "instance_norm",
    "linear",
    "lstm",
    "multihead_attention",
    "register_module_fixer",
    "register_module_validator",
    "rnn",
    "validate",
]
