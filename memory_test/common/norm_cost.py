"""Time of the norms of a model's linear layers, and of their reduction over ranks.

Shapes: B samples of a rank, N samples of a case, T tokens, a layer takes d features to p.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memory_test.common.failures import UsageError
from memory_test.common.launch import Runtime
from memory_test.common.models import SHAPES
from memory_test.common.timing import milliseconds
from opacus.core.rules.linear import LinearRule
from opacus.core.rules.spec import LayerSpec

HEADER = (
    "layout",
    "backend",
    "tokens",
    "samples",
    "layers",
    "local",
    "reduction",
    "total",
    "share",
)
RULE = LinearRule()


def linear_layers(name: str) -> list[tuple[int, int]]:
    """Widths (d, p) of the linear layers of a built-in shape.

    Raises:
        UsageError: There is no such shape, or it is no language model.
    """
    shape = SHAPES.get(name)
    if shape is None or shape.family not in ("own", "llama", "gpt2"):
        known = [n for n, s in SHAPES.items() if s.family in ("own", "llama", "gpt2")]
        raise UsageError(f"--model-name {name}: must be one of {', '.join(known)}")
    s = shape.sizes
    if shape.family == "llama":
        h, m, v = s["hidden_size"], s["intermediate_size"], s["vocab_size"]
        kv = h * s["num_key_value_heads"] // s["num_attention_heads"]
        block = [(h, h), (h, kv), (h, kv), (h, h), (h, m), (h, m), (m, h)]
        return block * s["num_hidden_layers"] + [(h, v)]
    if shape.family == "gpt2":
        h, v = s["n_embd"], 50257
        return [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * s["n_layer"] + [(h, v)]
    h, v = s["width"], s["vocab_size"]
    return [*[(h, h)] * 4, (h, 4 * h), (4 * h, h)] * s["depth"] + [(h, v)]


@dataclass
class Case:
    """What is computed: the layers of the model for N samples, by a layout.

    ``sharded``: N = B, all layers. ``replicated``: N = W B, a share of the layers.
    """

    layers: list[tuple[int, int]]
    length: int
    batch: int
    layout: str
    runtime: Runtime
    tensors: dict[int, Tensor] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of samples N that this rank handles."""
        return self.batch * (self.runtime.world_size if self.layout == "replicated" else 1)

    def share(self) -> list[int]:
        """Numbers of the layers that this rank computes: all, or the W-th part of the work."""
        if self.layout == "sharded":
            return list(range(len(self.layers)))
        loads: list[float] = [0.0] * self.runtime.world_size
        own = []
        by_cost = sorted(
            range(len(self.layers)), key=lambda i: -self.layers[i][0] * self.layers[i][1]
        )
        for index in by_cost:
            rank = loads.index(min(loads))
            loads[rank] += self.layers[index][0] * self.layers[index][1]
            own += [index] if rank == self.runtime.rank else []
        return own

    def tensor(self, width: int) -> Tensor:
        """``[N, T, width]``, one for each width: the values do not matter, only the work."""
        if width not in self.tensors:
            device = self.runtime.device
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            own = 0 if self.layout == "replicated" else self.runtime.rank
            generator = torch.Generator(device).manual_seed(width * 1000 + own)
            shape = (self.samples, self.length, width)
            made = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            self.tensors[width] = made / width**0.5
        return self.tensors[width]

    def local(self, numbers: list[int]) -> Tensor:
        """Squared norms ``[N]`` of these layers together."""
        total = torch.zeros(self.samples, device=self.runtime.device)
        for index in numbers:
            d, p = self.layers[index]
            spec = LayerSpec("layer", nn.Linear, ("weight",), {"weight": (p, d)}, {})
            total += RULE.norm_sq(spec, (self.tensor(d),), self.tensor(p))["weight"]
        return total

    def reduce(self, norm_sq: Tensor, group: Any) -> Tensor:
        """Norms of the samples of all ranks: gathered, or with their parts added up."""
        if self.layout == "replicated":
            dist.all_reduce(norm_sq, group=group)
            return norm_sq
        parts = [torch.empty_like(norm_sq) for _ in range(self.runtime.world_size)]
        dist.all_gather(parts, norm_sq, group=group)
        return torch.cat(parts)


def measure(case: Case, backend: str, iterations: int) -> dict[str, Any]:
    """Median milliseconds, the slowest rank; a collective call."""
    group = dist.new_group(backend=backend)
    place = torch.device("cpu") if backend == "gloo" else case.runtime.device
    own = case.share()
    error = _error(case, group, place)
    local = _median(case.runtime, iterations, lambda: case.local(own))
    known = case.local(own).to(place)
    reduction = _median(case.runtime, iterations, lambda: case.reduce(known.clone(), group))
    total = _median(case.runtime, iterations, lambda: case.reduce(case.local(own).to(place), group))
    return {
        "layout": case.layout,
        "backend": backend,
        "seq_length": case.length,
        "samples": case.samples,
        "layers": len(own),
        "local_ms": local,
        "reduction_ms": reduction,
        "total_ms": total,
        "error": error,
    }


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table."""
    times = (row["local_ms"], row["reduction_ms"], row["total_ms"])
    share = row["reduction_ms"] / row["total_ms"]
    about = (row["layout"], row["backend"], row["seq_length"], row["samples"], row["layers"])
    return (*about, *(f"{t:.3f}" for t in times), f"{share:.1%}")


def _error(case: Case, group: Any, place: torch.device) -> float:
    """Largest relative error of what this layout gives against one rank that computes all."""
    everything = case.local(list(range(len(case.layers)))).to(place)
    found = case.reduce(case.local(case.share()).to(place), group)
    if case.layout == "sharded":
        first = case.runtime.rank * case.samples
        found = found[first : first + case.samples]
    return float(((found - everything).abs() / everything).max())


def _median(runtime: Runtime, iterations: int, work: Callable[[], Any]) -> float:
    times = []
    for turn in range(iterations + 2):
        runtime.barrier()
        took = milliseconds(work, runtime.device)
        times += [took] if turn >= 2 else []
    return runtime.largest([statistics.median(times)])[0]
