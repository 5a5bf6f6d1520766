"""Compiled blocks that checkpoint themselves: the checkpoint is opened around the graph.

Note [Checkpoints of compiled blocks]
    Some blocks call an activation checkpoint in their own forward: those of transformers after
    ``gradient_checkpointing_enable()``, and torch's ``CheckpointWrapper``. If such a block is
    compiled, the checkpoint is a part of its graph, in which the compiler allows no taps: the
    block would run without a graph. So the block's own checkpoint function is called around the
    compiled block instead, and in its place the block finds a function that just calls. What is
    saved and what runs again are the same: the block's inputs, and the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opacus.core.platform.torch_internals import call_instead


def _slot_of(module: nn.Module) -> str | None:
    """Where a module has the checkpoint function that its forward calls, if it does."""
    for kind in type(module).__mro__:
        if kind.__name__ == "GradientCheckpointingLayer" and kind.__module__.startswith(
            "transformers."
        ):  # earlier versions checkpoint in __call__, which is around the graph
            return None if "__call__" in vars(kind) else "_gradient_checkpointing_func"
        if kind.__name__ == "CheckpointWrapper" and kind.__module__.startswith("torch."):
            return "checkpoint_fn"
    return None


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Instead of a checkpoint."""
    return function(*args, **kwargs)


class _Around:
    """Calls a compiled block in the block's own checkpoint.

    Args:
        block: The block.
        slot: Name of its attribute that is the checkpoint function.
        compiled: What ``block.compile()`` made of it.
    """

    def __init__(self, block: nn.Module, slot: str, compiled: Callable[..., Any]) -> None:
        self.block, self.slot, self.compiled = block, slot, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        own: Any = vars(block).get(self.slot)
        wanted = block.training and getattr(block, "gradient_checkpointing", True)
        if wanted and torch.is_grad_enabled() and _runs_the_graph_again(own):
            return own(functools.partial(self._inside, **kwargs), *args)
        return self.compiled(*args, **kwargs)

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        held = vars(self.block)
        own, held[self.slot] = held[self.slot], _call
        try:
            return self.compiled(*args, **kwargs)
        finally:
            held[self.slot] = own


def _runs_the_graph_again(own: Any) -> bool:
    """Whether this is torch's checkpoint, of the kind that finds the forward pass again."""
    ours = isinstance(own, functools.partial) and own.func is checkpoint
    return ours and own.keywords.get("use_reentrant") is False


class OwnCheckpoints:
    """The modules of a model that checkpoint themselves.

    Args:
        modules: All modules of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        slots = [(module, _slot_of(module)) for module in modules]
        self.blocks = [(module, slot) for module, slot in slots if slot is not None]

    def put_around(self) -> None:
        """Open the checkpoints of blocks that are compiled by now around their graphs."""
        for block, slot in self.blocks:
            compiled = block._compiled_call_impl
            if compiled is not None and not isinstance(compiled, _Around):
                call_instead(block, _Around(block, slot, compiled))

    def remove(self) -> None:
        """Blocks are called as they were."""
        for block, _ in self.blocks:
            around: Any = block._compiled_call_impl
            if isinstance(around, _Around):
                call_instead(block, around.compiled)
