"""Times of the phases of a private step, and ranges for ``torch.profiler``.

======================================  ==================================================
``OPACUS_PROFILE_DETAILED=1``           a line for each phase of a step
``OPACUS_PROFILE_FSDP=1``               with FSDP2: norms, their reduction, that of gradients
``OPACUS_PROFILE_FSDP_DETAILED=1``      the same, and a line for each layer
======================================  ==================================================

On a GPU the borders of phases are events in its stream, which are read when the step is
over: nothing waits in the middle of it. Elsewhere they are wall-clock times. Without a
variable and without a running profiler, a border costs the test of two flags.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from opacus.core.platform.switches import switched_on
from opacus.core.platform.torch_internals import profiler_state

FIRST_BACKWARD = "First backward (norm pass)"
PARALLEL_NORMS = "Parallel norm computation"
CLIP_FACTORS = "Get clipping coef"
SECOND_BACKWARD = "Second backward (clipped sum)"
WEIGHTED_SUM = "Weighted sum"
CLIP_AND_SUM = "Clip and sum per-sample gradients"
REDUCTION = "Gradient reduction"
NOISE = "Noise"
STEP = "Optimizer step"
# In the order of a step, which is that of the lines.
PHASES = (
    FIRST_BACKWARD,
    PARALLEL_NORMS,
    CLIP_FACTORS,
    SECOND_BACKWARD,
    WEIGHTED_SUM,
    CLIP_AND_SUM,
    REDUCTION,
    NOISE,
    STEP,
)
# Work of a layer in a backward pass that the user started.
PER_SAMPLE_GRADIENTS = "Per-sample gradients"

# Parts of the norm phases.
LOCAL_COMPUTE = "Local compute"
STACK = "Stack norms"
ALL_REDUCE = "All-reduce"
FINAL_COMPUTE = "Final compute"
NORM_PARTS = (STACK, LOCAL_COMPUTE, ALL_REDUCE, FINAL_COMPUTE)

DETAILED, FSDP, FSDP_DETAILED = VARIABLES = (
    "OPACUS_PROFILE_DETAILED",
    "OPACUS_PROFILE_FSDP",
    "OPACUS_PROFILE_FSDP_DETAILED",
)
# Names of layers in a range or a line; of a larger group the rest is counted.
NAMES_SHOWN = 8
# Measurements that may wait for a step; backward passes without one must not fill memory.
MOST_SPANS = 1 << 20

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")
T = TypeVar("T")


def variables_set() -> frozenset[str]:
    """Which of :data:`VARIABLES` are 1 (default: none).

    Raises:
        ValueError: One is neither ``0`` nor ``1``.
    """
    return frozenset(name for name in VARIABLES if switched_on(name))


@dataclass(frozen=True)
class Span:
    """A measured time: of a phase alone, of a part of it, or of layers in it."""

    phase: str
    start: Any
    end: Any
    part: str = ""
    layers: str = ""

    def milliseconds(self) -> float:
        """Waits for the device to have come to the end of the span."""
        if isinstance(self.start, float):
            return float(self.end - self.start) * 1e3
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))


class StepProfile:
    """Times measured since the last step; one for the process, :data:`PROFILE`.

    A phase does not count the phases inside it, so that their times add up.

    Attributes:
        on: Whether a variable is set, so that times are measured.
        running: Phases that are measured now, or that a profiler sees; one in another.
    """

    def __init__(self) -> None:
        self.on = False
        self._variables: frozenset[str] = frozenset()
        self.running: list[str] = []
        self._since: Any = None
        self._cuda = False
        self._in_layers = False
        self._forget()

    def configure(self) -> None:
        """Read the environment variables again; called when a model becomes private.

        Raises:
            ValueError: A variable is neither ``0`` nor ``1``; nothing has changed then.
        """
        self._variables = variables_set()
        self.on = bool(self._variables)
        self._forget()

    def _forget(self) -> None:
        self._spans: list[Span] = []
        self._batches = 0
        self._deferred: set[str] = set()

    # --- measuring ---

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as ``name``, and make it a profiler range."""
        if self.running and self.running[-1] == name:
            yield
            return
        self._batches += name == FIRST_BACKWARD
        self._border()
        self.running.append(name)
        try:
            with record_function(f"opacus::{name}"):
                yield
        finally:
            self._border()
            self.running.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of the running phase, which counts it too."""
        with self._measured(part=name):
            yield

    @contextmanager
    def layers(self, names: Sequence[str]) -> Iterator[None]:
        """Measure what layers do in the running phase, and make it a profiler range."""
        if self._in_layers:
            yield
            return
        shown = _joined(names)
        self._in_layers = True
        try:
            with record_function(f"opacus::{self._phase} {shown}"), self._measured(layers=shown):
                yield
        finally:
            self._in_layers = False

    def deferred_norms(self, layers: Iterable[str]) -> None:
        """Note which layers' norms are computed together after the backward pass."""
        self._deferred.update(layers)

    @property
    def _phase(self) -> str:
        return self.running[-1] if self.running else PER_SAMPLE_GRADIENTS

    @contextmanager
    def _measured(self, **what: str) -> Iterator[None]:
        start = self._mark()
        try:
            yield
        finally:
            self._add(Span(self._phase, start, self._mark(), **what))

    def _border(self) -> None:
        now = self._mark()
        if self.running:
            self._add(Span(self.running[-1], self._since, now))
        self._since = now

    def _add(self, span: Span) -> None:
        # A profiler alone measures nothing here; it may also have started within the span.
        if not self.on or span.start is None or span.end is None:
            return
        if len(self._spans) >= MOST_SPANS:
            self._forget()
        self._spans.append(span)

    def _mark(self) -> Any:
        if not self.on:
            return None
        if not self._spans and not self.running:
            self._cuda = torch.cuda.is_initialized()
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # --- reporting ---

    def report(self, sharded: bool) -> None:
        """Print the lines of this rank for what was measured since the last call.

        Args:
            sharded: Whether the model is sharded by FSDP2.
        """
        spans, batches, deferred = self._spans, self._batches, len(self._deferred)
        self._forget()
        lines: list[str] = []
        if DETAILED in self._variables:
            lines += _phase_lines(spans, batches, deferred)
        if sharded and self._variables & {FSDP, FSDP_DETAILED}:
            lines += _fsdp_lines(spans)
        if sharded and FSDP_DETAILED in self._variables:
            lines += _layer_lines(spans)
        if lines:
            print("\n".join(lines), flush=True)  # in one piece: other ranks print too


PROFILE = StepProfile()
NOTHING = nullcontext()


# --- for the code that is measured ---


def timed(phase: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: calls of the function are ``phase``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if PROFILE.on or profiler_state._is_profiler_enabled:
                with PROFILE.phase(phase):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    return decorate


def part(name: str) -> AbstractContextManager[None]:
    """Measure the block as a part of the running phase."""
    return PROFILE.part(name) if PROFILE.on else NOTHING


def layers(names: Iterable[str]) -> AbstractContextManager[None]:
    """Measure the block as work of the layers with these names."""
    if PROFILE.on or profiler_state._is_profiler_enabled:
        return PROFILE.layers(list(names))
    return NOTHING


def each_layer(
    function: Callable[Concatenate[S, R, P], T],
) -> Callable[Concatenate[S, R, P], T]:
    """Decorator of a method whose first argument is a record, or several: their layers' work."""

    @functools.wraps(function)
    def run(owner: S, what: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if PROFILE.on or profiler_state._is_profiler_enabled:
            with PROFILE.layers(_names(what)):
                return function(owner, what, *args, **kwargs)
        return function(owner, what, *args, **kwargs)

    return run


def _names(what: Any) -> list[str]:
    """Qualified names of the layers of records, or of the parameters in a bucket."""
    if hasattr(what, "names"):
        return list(what.names)
    records = what if isinstance(what, Sequence) else [what]
    return list(dict.fromkeys(record.spec.name for record in records))


def _joined(names: Sequence[str]) -> str:
    shown = ", ".join(name or "(root)" for name in names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


# --- the lines ---


def _phase_times(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of each phase that took place, in the order of a step."""
    total: dict[str, float] = {}
    for span in spans:
        if not span.part and not span.layers:
            total[span.phase] = total.get(span.phase, 0.0) + span.milliseconds()
    return {phase: total[phase] for phase in PHASES if phase in total}


def _phase_lines(spans: Sequence[Span], batches: int, deferred: int) -> list[str]:
    times, lines = _phase_times(spans), []
    if deferred:
        norms = times.get(PARALLEL_NORMS, 0.0)
        lines += [
            f"[Deferred Norm] Computed {deferred} layer norms in parallel: {norms:.2f} ms",
            f"[Deferred Norm] Average per layer: {norms / deferred:.2f} ms",
        ]
    if batches > 1:
        lines.append(f"[Profile] Rank {_rank()} Sum over physical batches: {batches}")
    return lines + [f"[Profile] Rank {_rank()} {name}: {ms:.2f} ms" for name, ms in times.items()]


def _fsdp_lines(spans: Sequence[Span]) -> list[str]:
    times, norms = _phase_times(spans), _norm_times(spans)
    width = max(map(len, NORM_PARTS)) + 1
    lines = [f"[FSDP Profile] Rank {_rank()} get_norm_sample timing breakdown:"]
    for name, ms in [*norms.items(), ("TOTAL", sum(norms.values()))]:
        lines.append(f"  - {name + ':':{width}} {ms:.2f} ms")
    if SECOND_BACKWARD in times:
        what, ms = f"{REDUCTION}, with the second backward around it", times[SECOND_BACKWARD]
    else:
        what, ms = f"{REDUCTION}, what was waited for", times.get(REDUCTION, 0.0)
    lines.append(f"[FSDP Profile] Rank {_rank()} {what}: {ms:.2f} ms")
    step = sum(times.values())
    share = 100 * sum(norms.values()) / step if step else 0.0
    lines.append(
        f"[FSDP Profile] Rank {_rank()} Step, without forward: {step:.2f} ms (norms {share:.1f}%)"
    )
    return lines


def _norm_times(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of each part of the norms, also those computed in backward hooks."""
    total = dict.fromkeys(NORM_PARTS, 0.0)
    for span in spans:
        in_hook = span.phase == FIRST_BACKWARD and bool(span.layers)
        if span.part or in_hook:
            total[span.part or LOCAL_COMPUTE] += span.milliseconds()
    return total


def _layer_lines(spans: Sequence[Span]) -> list[str]:
    total: dict[tuple[str, str], float] = {}
    for span in spans:
        if span.layers:
            key = (span.phase, span.layers)
            total[key] = total.get(key, 0.0) + span.milliseconds()
    return [
        f"[FSDP Profile] Rank {_rank()} {phase} {layers}: {ms:.2f} ms"
        for (phase, layers), ms in total.items()
    ]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
