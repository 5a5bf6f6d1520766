"""A compiler that remembers nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
from torch._dynamo.utils import counters


@contextmanager
def fresh_graphs() -> Iterator[None]:
    """There are no graphs before and after, and guards on hooks are as they were."""
    torch._dynamo.reset()
    counters.clear()
    watched = torch._dynamo.config.skip_nnmodule_hook_guards
    yield
    torch._dynamo.config.skip_nnmodule_hook_guards = watched
    torch._dynamo.reset()
