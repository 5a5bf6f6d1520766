"""Scenarios: which modules the validator accepts, why not, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import opacus.layers as dp
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError


class Net(nn.Module):
    """A network of which several parts have to be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTM(8, 4))
        self.attention = nn.MultiheadAttention(8, 2)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def evaluated(module: nn.Module) -> nn.Module:
    return module.eval()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": partial(nn.Linear, 4, 4),
    "conv": partial(nn.Conv2d, 3, 8, 3, groups=1),
    "embedding_bag": partial(nn.EmbeddingBag, 5, 4),
    "batch_norm_1d": partial(nn.BatchNorm1d, 32),
    "batch_norm_2d": partial(nn.BatchNorm2d, 64),
    "batch_norm_3d": partial(nn.BatchNorm3d, 6),
    "batch_norm_odd": partial(nn.BatchNorm2d, 7),
    "sync_batch_norm": partial(nn.SyncBatchNorm, 16),
    "group_norm": partial(nn.GroupNorm, 2, 8),
    "layer_norm": partial(nn.LayerNorm, 8),
    "instance_norm": partial(nn.InstanceNorm1d, 8, affine=True),
    "instance_norm_tracking": partial(nn.InstanceNorm2d, 8, affine=True, track_running_stats=True),
    "gru": partial(nn.GRU, 4, 3, num_layers=2),
    "lstm": partial(nn.LSTM, 4, 3, bidirectional=True, batch_first=True),
    "dp_lstm": partial(dp.DPLSTM, 4, 3),
    "attention": partial(nn.MultiheadAttention, 8, 2),
    "dp_attention": partial(dp.DPMultiheadAttention, 8, 2),
    "encoder_layer": partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0),
    "nested": Net,
    "evaluated": lambda: evaluated(nn.Linear(4, 4)),
    "nothing_trainable": lambda: frozen(nn.Linear(4, 4)),
}


def kind(module: nn.Module) -> str:
    """Its first class that is public."""
    kinds = type(module).__mro__
    return next(k.__name__ for k in kinds if "torch.nn" in k.__module__ or hasattr(dp, k.__name__))


def shape_of(module: nn.Module) -> list[str]:
    """Kind and parameters of every submodule."""
    kinds = [f"{name}: {kind(part)}" for name, part in module.named_modules()]
    sizes = [f"{name}: {tuple(p.shape)} {p.requires_grad}" for name, p in module.named_parameters()]
    return kinds + sizes


def verdict(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = MODULES[name]()
    errors = ModuleValidator.validate(module, strict=False)
    fixed = ModuleValidator.fix(MODULES[name]())
    try:
        compatible = shape_of(PrivacyEngine.get_compatible_module(MODULES[name]()))
    except UnsupportedModuleError:
        compatible = ["refused"]
    return {
        "valid": ModuleValidator.is_valid(module),
        "errors": sorted(type(error).__name__ for error in errors),
        "fixed": shape_of(fixed),
        "fixed_valid": ModuleValidator.is_valid(fixed),
        "compatible": compatible,
    }


def outputs(name: str) -> dict[str, Tensor]:
    """What a replacement computes from the weights it was given."""
    torch.manual_seed(0)
    module = MODULES[name]()
    inputs = {
        "batch_norm_2d": (torch.randn(3, 64, 4, 4),),
        "lstm": (torch.randn(3, 5, 4),),
        "gru": (torch.randn(5, 3, 4),),
        "attention": (torch.randn(5, 3, 8),) * 3,
    }[name]
    output = ModuleValidator.fix(module)(*inputs)
    return {"output": (output[0] if isinstance(output, tuple) else output).detach()}


RUNS: dict[str, Any] = {f"verdict-{name}": partial(verdict, name) for name in MODULES}
RUNS |= {
    f"fixed-{name}": partial(outputs, name)
    for name in ("batch_norm_2d", "lstm", "gru", "attention")
}
