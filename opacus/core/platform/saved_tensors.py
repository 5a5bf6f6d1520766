"""What graphs save: whether it goes through hooks, as checkpoints let it, and how long it stays."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from opacus.core.platform.torch_internals import number_of_backward


def packs_saved_tensors() -> bool:
    """Whether what graphs save goes through hooks: to be computed again by a checkpoint, say.

    Also where this version of torch does not say.
    """
    asked: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return asked is None or asked(True) is not None


def finds_saved_tensors() -> bool:
    """Whether a checkpoint runs a part of the model again only for what its graph had saved.

    So a checkpoint that is not reentrant does. No gradient goes through what is computed now. False
    for a selective one, which gives the results of some operations in the order in which they ran,
    and where this version of torch does not say.
    """
    asked: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
    if asked is None or modes is None or number_of_backward() < 0 or modes():
        return False
    hooks = asked(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return name.startswith("_recomputation_hook.")  # of torch.utils.checkpoint


def let_graphs_run_backward_twice() -> None:
    """Compiled graphs keep what they save until it is dropped; torch lets them give it away.

    Those that were made otherwise are dropped. It holds for all that is compiled from now on.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    if not getattr(config, "donated_buffer", False):
        return
    config.donated_buffer = False
    dynamo: Any = sys.modules.get("torch._dynamo")
    if hasattr(dynamo, "reset"):
        dynamo.reset()
