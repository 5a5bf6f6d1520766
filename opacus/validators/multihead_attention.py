"""Validates and replaces ``nn.MultiheadAttention``."""

from __future__ import annotations

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


@register_module_fixer(nn.MultiheadAttention)
def fix(module: nn.MultiheadAttention) -> DPMultiheadAttention:
    """An equivalent :class:`~opacus.layers.DPMultiheadAttention` with copies of the weights."""
    with torch.device("meta"):
        new = DPMultiheadAttention(
            embed_dim=module.embed_dim,
            num_heads=module.num_heads,
            dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
        )
    for torch_name, parameter in module.named_parameters(remove_duplicate=False):
        for name, part in split_torch_parameter(torch_name, parameter.detach()).items():
            path, _, local = name.rpartition(".")
            copied = nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)
            setattr(new.get_submodule(path), local, copied)
    return new
