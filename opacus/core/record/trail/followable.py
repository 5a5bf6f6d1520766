"""Whether a forward pass can be followed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from opacus.core.platform.torch_internals import under_functorch
from opacus.core.platform.trees import tensors_of
from opacus.core.record.trail.op import is_plain


def can_follow(model: nn.Module, inputs: Any) -> bool:
    """Whether a forward pass can be followed: nothing is compiled, nor under ``torch.func``."""
    if torch.compiler.is_compiling() or under_functorch() or _is_compiled(model):
        return False
    return all(is_plain(t) for t in tensors_of(inputs))


def _is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` made parts of the model."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile
    if dynamo is None:
        return False
    compiled = getattr(dynamo, "OptimizedModule", ())
    return any(
        isinstance(m, compiled) or m._compiled_call_impl is not None for m in model.modules()
    )
