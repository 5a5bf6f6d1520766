"""The one way in which work is timed here: from an idle device until it is idle again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def wait_for(device: torch.device | str) -> None:
    """Wait until a GPU has done what was asked of it; a CPU always has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[], Any], device: torch.device | str) -> float:
    """Milliseconds of a call by the clock on the wall, its launches included.

    Ranks that start together wait at a barrier of theirs before.
    """
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return (time.perf_counter() - start) * 1e3
