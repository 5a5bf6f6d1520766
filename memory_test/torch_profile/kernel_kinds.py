"""What a step spends its time on: kernels of a GPU, or operators on the CPU, by kind.

The kind follows from the name, and, where that says little, from the phase that launched it:
an elementwise kernel that computes clipping factors is "clip", one of a norm is "norm".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memory_test.torch_profile.traces import (
    KERNELS,
    LAUNCHES,
    Event,
    PhaseMap,
    correlation,
    spans,
)

# The first pattern that is found in a name decides. Order matters: a fused attention kernel
# may be called after CUTLASS, and the squares of a norm are summed by a reduction.
_PATTERNS = (
    ("attention", r"fmha|flash|attention|sdpa"),
    (
        "gemm",
        r"gemm|gemv|einsum|nvjet|cutlass|cublas|xmma|splitk|matmul|dot_kernel"
        r"|aten::(addmm|addmv|mm|bmm|baddbmm|addbmm|mv|dot|linear)$",
    ),
    ("layer_norm", r"layer_?norm|gammabeta|cucompute"),
    ("noise", r"distribution|philox|curand|normal_|random|rand"),
    ("norm", r"norm"),
    ("clip", r"clip|clamp"),
    ("loss", r"softmax|nll_loss|cross_entropy"),
    ("indexing", r"index|embedding|scatter|gather|arange|triu|sort"),
    ("copy", r"memcpy|memset|copy|clone|catarray|aten::(cat|stack|fill_|zero_)$|fillfunctor"),
    ("reduce", r"reduce|aten::(sum|mean|amax|amin|max|min|prod|any|all|cumsum)"),
    (
        "elementwise",
        r"elementwise|multi_tensor_apply|foreach|pointwise"
        r"|aten::(add|sub|mul|div|neg|sqrt|rsqrt|pow|square|exp|log|abs|gelu|relu|tanh|where"
        r"|masked_fill|reciprocal|minimum|maximum|isfinite|eq|ne|lt|gt|le|ge|logical|bitwise"
        r"|addcmul|addcdiv|lerp|nan_to_num)",
    ),
)
_COMPILED = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS]
# In the order of tables.
KINDS = (
    "gemm",
    "attention",
    "elementwise",
    "reduce",
    "norm",
    "clip",
    "noise",
    "layer_norm",
    "loss",
    "indexing",
    "copy",
    "other",
)
_ALWAYS_BY_NAME = ("gemm", "attention", "noise", "copy")
_KIND_OF_PHASE = {"per_sample_norms": "norm", "clip_factors": "clip"}
TOP = 15


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel, or the own time of an operator.

    Attributes:
        name: As the profiler calls it.
        kind: One of :data:`KINDS`.
        phase: Phase that launched it.
        ms: Duration in milliseconds.
    """

    name: str
    kind: str
    phase: str
    ms: float


def kind_of(name: str, phase: str = "other") -> str:
    """The kind of a kernel or operator, from its name and the phase that launched it."""
    by_name = next((kind for kind, pattern in _COMPILED if pattern.search(name)), "other")
    if by_name in _ALWAYS_BY_NAME:
        return by_name
    if by_name == "other" and name.startswith("aten::"):
        return "other"  # makes a view or reserves memory
    if by_name == "other" and phase == "weighted_sum":
        return "reduce"  # a kernel of our own
    return _KIND_OF_PHASE.get(phase, by_name)


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """Kernels of a GPU if the trace has any, else the operators of the CPU."""
    events = trace["traceEvents"]
    phases = PhaseMap(events)
    timed = _gpu_times(events) if spans(events, "kernel") else _own_times(events)
    found = []
    for event, moment, duration in timed:
        phase = phases.at(moment)
        name = str(event["name"])
        found.append(Kernel(name, kind_of(name, phase), phase, duration / 1e3))
    return found


def _gpu_times(events: list[Event]) -> Iterator[tuple[Event, float, float]]:
    """Kernels, when they were launched, and how long they ran; microseconds."""
    launches: dict[Any, float] = {correlation(e): e["ts"] for e in spans(events, *LAUNCHES)}
    for event in spans(events, *KERNELS):
        moment = launches.get(correlation(event))
        yield event, event["ts"] if moment is None else moment, event["dur"]


def _own_times(events: list[Event]) -> Iterator[tuple[Event, float, float]]:
    """Operators, their starts, and their time without that of operators inside; microseconds."""
    inside: dict[int, float] = defaultdict(float)
    running: dict[Any, list[Event]] = defaultdict(list)
    operators = spans(events, "cpu_op")
    for event in operators:
        stack = running[event["pid"], event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            inside[id(stack[-1])] += event["dur"]
        stack.append(event)
    for event in operators:
        yield event, event["ts"], max(event["dur"] - inside[id(event)], 0.0)


def summary(kernels: list[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds a step by kind, by phase, by both, and the kernels that took longest.

    Args:
        kernels: From :func:`kernels_of`.
        steps: Number of steps that they belong to.
    """
    table: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    calls: dict[str, int] = dict.fromkeys(KINDS, 0)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        kinds[kernel.kind] += kernel.ms / steps
        calls[kernel.kind] += 1
        table[kernel.phase][kernel.kind] += kernel.ms / steps
        by_name[kernel.name, kernel.kind].append(kernel.ms)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "total_ms": round(sum(kinds.values()), 4),
        "kinds_ms": {kind: round(ms, 4) for kind, ms in kinds.items()},
        "calls": {kind: round(count / steps, 1) for kind, count in calls.items()},
        "phases_ms": {phase: round(sum(row.values()), 4) for phase, row in table.items()},
        "phases_by_kind_ms": {
            phase: {kind: round(ms, 4) for kind, ms in row.items()} for phase, row in table.items()
        },
        "longest": [
            {
                "name": name,
                "kind": kind,
                "calls": round(len(times) / steps, 1),
                "ms": round(sum(times) / steps, 4),
            }
            for (name, kind), times in longest
        ],
    }
