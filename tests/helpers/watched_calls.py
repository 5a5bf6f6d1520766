"""Ways in which somebody else looks at a layer's call, or puts another in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook


@contextlib.contextmanager
def hooked(layer: Any) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda m, a, output: output * 1.0)
    yield
    handle.remove()


@contextlib.contextmanager
def watched(layer: Any) -> Iterator[None]:
    handle = layer.register_full_backward_hook(lambda m, i, o: None)
    yield
    handle.remove()


@contextlib.contextmanager
def replaced(layer: Any) -> Iterator[None]:
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    yield
    del layer.forward


@contextlib.contextmanager
def all_replaced(layer: Any) -> Iterator[None]:
    own = nn.Linear.forward
    nn.Linear.forward = lambda self, x: own(self, x) * 1.0  # type: ignore[method-assign]
    yield
    nn.Linear.forward = own  # type: ignore[method-assign]


@contextlib.contextmanager
def all_hooked(layer: Any) -> Iterator[None]:
    handle = register_module_forward_hook(lambda m, a, output: None)
    yield
    handle.remove()


@contextlib.contextmanager
def saved_elsewhere(layer: Any) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        yield
