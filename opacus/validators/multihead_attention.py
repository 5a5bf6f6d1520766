"""Validates and replaces ``nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_multihead_attention import split_torch_parameter
from opacus.validators.errors import ShouldReplaceModuleError
from opacus.validators.utils import register_module_fixer, register_module_validator


@register_module_validator(nn.MultiheadAttention)
def validate(module: nn.MultiheadAttention) -> list[ShouldReplaceModuleError]:
    """An error: the module has to be replaced."""
    return [
        ShouldReplaceModuleError(
            "nn.MultiheadAttention computes with its parameters, those of its layer out_proj "
            "too, without calling layers, so there are no per-sample gradients; "
            "ModuleValidator.fix() replaces it by the equivalent DPMultiheadAttention"
        )
    ]


# Arguments that both classes keep as attributes of the same names.
_SAME = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")


@register_module_fixer(nn.MultiheadAttention)
def fix(module: nn.MultiheadAttention) -> DPMultiheadAttention:
    """An equivalent :class:`~opacus.layers.DPMultiheadAttention` with copies of the weights."""
    with torch.device("meta"):
        same: dict[str, Any] = {name: getattr(module, name) for name in _SAME}
        biases = {"bias": module.in_proj_bias, "add_bias_kv": module.bias_k}
        same |= {name: bias is not None for name, bias in biases.items()}
        new = DPMultiheadAttention(**same)
    for torch_name, parameter in module.named_parameters(remove_duplicate=False):
        for name, part in split_torch_parameter(torch_name, parameter.detach()).items():
            path, _, local = name.rpartition(".")
            copied = nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)
            setattr(new.get_submodule(path), local, copied)
    return new
