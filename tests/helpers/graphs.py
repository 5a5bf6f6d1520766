"""A compiler that remembers nothing, and layers whose rows move in what it compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

Move = Callable[[nn.Module, Tensor], Tensor]


@contextmanager
def fresh_graphs() -> Iterator[None]:
    """There are no graphs before and after, and guards on hooks are as they were."""
    torch._dynamo.reset()
    counters.clear()
    watched = torch._dynamo.config.skip_nnmodule_hook_guards
    yield
    torch._dynamo.config.skip_nnmodule_hook_guards = watched
    torch._dynamo.reset()


def turned(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.flip(0)).flip(0)  # type: ignore[no-any-return]


def time_first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(0, 1).contiguous()).transpose(0, 1)  # type: ignore[no-any-return]
