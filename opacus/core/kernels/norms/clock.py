"""Runs the fastest of several ways, each measured once on this card."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from opacus.core.kernels.host.operands import interpreted

REFERENCE = "reference"
# Timed calls of each way, after one that is not timed; the fastest counts.
REPEATS = 3
# File that keeps what was measured; a plain name lies in ~/.cache/opacus.
CACHE_VARIABLE = "OPACUS_KERNEL_CACHE"

T = TypeVar("T")
Ways = dict[str, Callable[[], T]]

_costs: dict[str, dict[str, float]] = {}
# The fastest of some ways, by key and their names.
_best: dict[tuple[str, ...], str] = {}


def measured() -> dict[str, dict[str, float]]:
    """Milliseconds of each way, by operation, card, dtype and sizes; for reports."""
    return _costs


def forget() -> None:
    """Measure everything anew, and read the file again."""
    _costs.clear()
    _best.clear()
    _load.cache_clear()


def fastest(key: str, ways: Ways[T]) -> T:
    """The result of the way that was fastest when sizes like these were first seen."""
    asked = (key, *ways)
    if asked in _best:
        return ways[_best[asked]]()
    _load()
    known = {name: cost for name, cost in _costs.get(key, {}).items() if name in ways}
    if not known:
        if interpreted() or torch.cuda.is_current_stream_capturing():
            return ways[_unmeasured(ways)]()
        known = _costs[key] = _measure(ways)
        _save()
    _best[asked] = min(known, key=known.__getitem__)
    return ways[_best[asked]]()


def _unmeasured(ways: Ways[T]) -> str:
    """A default kernel where nothing can be timed: in the interpreter and in graph capture."""
    return next((name for name in ways if name != REFERENCE), REFERENCE)


def _measure(ways: Ways[T]) -> dict[str, float]:
    """Milliseconds of each way. Ways that need more than the card has are left out."""
    times = {}
    for name, way in ways.items():
        with contextlib.suppress(*too_large()):
            times[name] = _milliseconds(way)
    return times


def _milliseconds(way: Callable[[], T]) -> float:
    """Shortest of a few calls; host time counts where the device waits for it."""
    way()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        way()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def too_large() -> tuple[type[Exception], ...]:
    """Errors of a way that needs more than the card has."""
    from triton.runtime.errors import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        OutOfResources,
    )

    return (OutOfResources, torch.cuda.OutOfMemoryError)


def fastest_of(key: str, names: Sequence[str]) -> str | None:
    """The way that :func:`fastest` takes of these, once it is known."""
    return _best.get((key, *names))


def key_of(
    operation: str, tensor: Tensor, sizes: Sequence[int], options: tuple[object, ...]
) -> str:
    """One for all sizes that agree in their three leading bits."""
    return _key_text(operation, tensor.device, tensor.dtype, tuple(sizes), options)


@functools.lru_cache(maxsize=4096)
def _key_text(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    options: tuple[object, ...],
) -> str:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rough = "x".join(str(_leading_bits(size)) for size in sizes)
    name = str(dtype).removeprefix("torch.")
    return "/".join([operation, card, torch.__version__, name, rough, *map(str, options)])


def _leading_bits(size: int) -> int:
    shift = max(0, size.bit_length() - 3)
    return size >> shift << shift


# --- the file ---


def cache_file() -> Path | None:
    """Where measurements are kept between runs; ``None`` unless the variable names a file."""
    name = os.environ.get(CACHE_VARIABLE)
    return Path.home() / ".cache" / "opacus" / name if name else None


@functools.cache
def _load() -> None:
    file = cache_file()
    if file is not None and file.is_file():
        for key, times in _read(file).items():
            _costs.setdefault(key, times)


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(file.read_text())
        return {str(k): {str(n): float(t) for n, t in v.items()} for k, v in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # unreadable, or half written by another program: measure again


def _save() -> None:
    """Add what was measured to the file, in one step: other processes read it too."""
    file = cache_file()
    if file is None:
        return
    with contextlib.suppress(OSError):  # a read-only home costs time, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        together = {**(_read(file) if file.is_file() else {}), **_costs}
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "w") as out:
            json.dump(together, out, indent=1, sort_keys=True)
        os.replace(name, file)
