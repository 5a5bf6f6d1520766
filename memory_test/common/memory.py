"""What a step keeps in memory, by kind, and its peak; bytes unless a name says otherwise."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

MB = 1 << 20


class MemoryWatch:
    """Measures one step of a run, in a step of its own, untimed.

    Args:
        model: The model, private or not.
        optimizer: Its optimizer.
        device: Where they live.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.activations = 0
        self.norm_cache = 0
        if hasattr(model, "compute_all_norms_parallel"):
            self._watch_norm_cache(model)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass: what it leaves for the backward pass are activations."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            yield
            self.activations = torch.cuda.memory_allocated(self.device) - before
            return
        known = {_storage(p) for p in local_tensors(self.model.parameters())}
        seen: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            inner = _local(tensor)
            if _storage(inner) not in known:
                seen[_storage(inner)] = inner.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        self.activations = sum(seen.values())

    def breakdown(self) -> dict[str, float]:
        """MB of each kind on this rank; call it after a step, before gradients are cleared."""
        parameters = list(self.model.parameters())
        gradients = [getattr(p, a, None) for p in parameters for a in ("grad", "summed_grad")]
        state = getattr(self.optimizer, "state", {})
        kinds = {
            "parameters": (*parameters, *self.model.buffers()),
            "gradients": gradients,
            "per_sample_gradients": [getattr(p, "grad_sample", None) for p in parameters],
            "optimizer": [v for entry in state.values() for v in entry.values()],
        }
        found = {kind: size_of(tensors) / MB for kind, tensors in kinds.items()}
        found["activations"] = self.activations / MB
        found["norm_cache"] = self.norm_cache / MB
        return {kind: round(value, 3) for kind, value in found.items()}

    def _watch_norm_cache(self, model: Any) -> None:
        inner = model.compute_all_norms_parallel

        def watched() -> Tensor:
            self.norm_cache = max(self.norm_cache, size_of(_backprops_waiting(model)))
            return inner()

        model.compute_all_norms_parallel = watched


def _backprops_waiting(model: Any) -> list[Tensor]:
    """Backprops of records that wait for their norms or are kept for the clipped sum."""
    ledger = getattr(getattr(model, "_strategy", None), "ledger", None)
    held = list(ledger.kept.held) if ledger is not None else []
    records = [*(getattr(model, "_deferred_norm_cache", None) or []), *held]
    formed = list(ledger.kept.formed.values() if ledger is not None else ())
    return [*tree_leaves([getattr(r, "backprops", None) for r in records]), *formed]


def size_of(tensors: Iterable[Any]) -> int:
    """Bytes of the storages on this rank, each counted once."""
    sizes = {_storage(t): t.untyped_storage().nbytes() for t in local_tensors(tensors)}
    return sum(sizes.values())


def local_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """This rank's part of every tensor among ``values``."""
    for value in tree_leaves(list(values)):
        if isinstance(value, Tensor):
            yield _local(value)


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far; only a GPU's allocator can."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def release(device: torch.device) -> None:
    """Give back what an earlier run in this process left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_mb(device: torch.device) -> float:
    """What a GPU's allocator has given out; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) / MB if device.type == "cuda" else 0.0


def peak_mb(device: torch.device) -> float:
    """Peak of a GPU's allocated memory, or of the process' resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
