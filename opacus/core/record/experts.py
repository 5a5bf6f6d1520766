"""Mixtures of experts: rows that a router moves inside a module, and that come back.

Note [Rows of experts]
    A router's choices move rows as values say, so they would have to be followed in each forward
    pass, which takes longer than the model. The experts of transformers (classes under its
    ``use_experts_implementation``) get rows ``[N, d]`` and give row i of the result for row i,
    whatever the choice. In passes that are followed this is looked at; if it was so, nothing that
    follows depends on the choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opacus.core.record.whose import WhoseRows


class Recording(Protocol):
    """See :class:`opacus.core.record.recorder.Recorder`."""

    whose: WhoseRows


_HOME = "transformers.integrations.moe"


def give_rows_back(module: nn.Module) -> bool:
    """Whether its class is one of transformers' experts (a user's own may be decorated alike)."""
    forward: Any = type(module).forward
    decorated = getattr(forward, "__globals__", {}).get("__name__") == _HOME
    return decorated and forward.__module__.startswith("transformers.")


def watch_experts(modules: Iterable[nn.Module], recorder: Recording) -> list[Any]:
    """Let what follows a forward pass know of the rows that experts give back.

    Args:
        modules: Of the model.
        recorder: That of the model.

    Returns:
        Handles of the hooks. They run before the hooks that experts have as a layer.
    """
    handles: list[Any] = []
    for module in filter(give_rows_back, modules):
        watch = _Watch(recorder)
        handles += [
            module.register_forward_pre_hook(watch.before),
            module.register_forward_hook(watch.after, with_kwargs=True, prepend=True),
        ]
    return handles


class _Watch:
    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self._looked: tuple[bool, bool] | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        trail = None if torch.compiler.is_compiling() else self._recorder.whose.scope
        self._looked = None if trail is None else trail.looked

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        looked, self._looked = self._looked, None
        trail, given = self._recorder.whose.scope, args[0] if args else kwargs.get("hidden_states")
        if looked is None or trail is None or not (type(given) is type(output) is Tensor):
            return
        if trail.came_back(given, output):
            trail.looked = looked
