"""What the validators of torch's recurrent modules share."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from opacus.layers.rnn_base import DPRNNBase
from opacus.validators.errors import ShouldReplaceModuleError

D = TypeVar("D", bound=DPRNNBase)


# Arguments that both classes keep as attributes of the same names.
_SAME = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
    "proj_size",
)  # fmt: skip


def should_replace(module: nn.RNNBase, replacement: type[DPRNNBase]) -> ShouldReplaceModuleError:
    """The error for a module that computes in one kernel."""
    return ShouldReplaceModuleError(
        f"nn.{module.__class__.__name__} computes all time steps in one kernel, which gives no "
        f"per-sample gradients; ModuleValidator.fix() replaces it by the equivalent "
        f"{replacement.__name__}"
    )


def convert(module: nn.RNNBase, replacement: type[D], **options: Any) -> D:
    """A ``replacement`` that computes what ``module`` does, with copies of its weights."""
    with torch.device("meta"):
        same: dict[str, Any] = {name: getattr(module, name) for name in _SAME}
        new = replacement(**same, **options)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        copied = parameter.detach().clone()
        setattr(new, name, nn.Parameter(copied, requires_grad=parameter.requires_grad))
    return new
