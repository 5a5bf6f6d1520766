"""Times contenders in alternating order, so host noise affects all of them equally."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from memory_test.benchmarks.cases import Cell
from memory_test.benchmarks.contenders import Contender, Recipe, build
from memory_test.benchmarks.step_check import Check, full_check, relative, small_checks
from memory_test.benchmarks.step_truth import Expected, full_truth, whole_gradient
from memory_test.benchmarks.ways import GIB, Way
from memory_test.common.failures import UsageError, is_out_of_memory
from memory_test.common.launch import Runtime
from memory_test.common.memory import MB, peak_mb, reset_peak
from memory_test.common.timing import milliseconds


@dataclass(frozen=True)
class Plan:
    """How long and in which turns contenders are timed.

    Attributes:
        iters: Timed steps of each contender.
        warmup: Steps before them; in every round when contenders take turns in rounds.
        rounds: 0: all contenders are in memory and take turns step by step. Else one at a time
            is, so many times each; for models of which two do not fit. At least once where a
            way has a budget, which is one of the whole card.
        checks: ``"full"``: modes are checked on a small model and on each cell; ``"small"``: on
            the small one only; ``"none"``.
    """

    iters: int = 10
    warmup: int = 3
    rounds: int = 0
    checks: str = "full"


@dataclass
class Taken:
    """Measurements of one contender.

    Attributes:
        way: The mode.
        times_ms: Of each timed step, the slowest rank.
        peak_mb: Largest peak of a rank, without what other contenders hold.
        checks: Comparisons with the reference.
        held: What the latest step held for the clipped sum, see :meth:`Contender.held`.
        budget_gib: What its peak must stay under, if it has a budget.
        error: Why there is no result.
        status: ``"ok"``, ``"refused"`` if it is wrong, ``"out_of_memory"``, or ``"failed"``.
    """

    way: Way
    times_ms: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    checks: list[Check] = field(default_factory=list)
    held: dict[str, Any] = field(default_factory=dict)
    budget_gib: float | None = None
    error: str = ""
    status: str = "ok"


def measure_cell(
    recipe: Recipe,
    cell: Cell,
    ways: Sequence[Way],
    plan: Plan,
    runtime: Runtime,
    known: dict[Way, list[Check]] | None = None,
) -> list[Taken]:
    """Check and time all ways on one cell; a collective call.

    Args:
        recipe: How models are built.
        cell: Size of the batch.
        ways: What is timed; the first is the non-private step that modes are checked against.
        plan: How long.
        runtime: This process.
        known: Checks of small models by way, which do not depend on the cell; added to.
    """
    taken = [Taken(way) for way in ways]
    known = {} if known is None else known
    for one in taken:
        if plan.checks != "none" and one.way.private:
            with _failing(one, runtime):
                if one.way not in known:
                    known[one.way] = small_checks(recipe, one.way, runtime)
                    _forget_compiled([one.way])
                _judge(one, known[one.way])
    rounds = plan.rounds or int(any(way.budget is not None for way in ways))
    bench = _Bench(recipe, cell, replace(plan, rounds=rounds), runtime)
    bench.compiles = any(way.compiles for way in ways)
    try:
        (bench.in_rounds if rounds else bench.step_by_step)(taken)
    finally:
        _forget_compiled(ways)
        _clear(runtime)
    return taken


class _Bench:
    """One cell."""

    def __init__(self, recipe: Recipe, cell: Cell, plan: Plan, runtime: Runtime) -> None:
        self.recipe, self.cell, self.plan, self.runtime = recipe, cell, plan, runtime
        self.compiles = False  # whether any way does
        self.expected: Expected | None = None
        self.whole: dict[str, Tensor] | None = None  # gradient of the eager non-private step
        self.rounding = 0.0  # relative difference of that of the compiled one
        self.resident_mb: dict[Way, float] = {}  # of contenders that are in memory
        self.peaks_mb: dict[Way, float] = {}  # of non-private steps

    def step_by_step(self, taken: list[Taken]) -> None:
        """All contenders in memory, in alternating order."""
        ready = [(one, c) for one in taken if (c := self._ready(one)) is not None]
        with _frozen_garbage():
            for index in range(self.plan.iters):
                for one, contender in ready if index % 2 == 0 else reversed(ready):
                    with _failing(one, self.runtime):
                        if not one.error:
                            self._time(one, contender)

    def in_rounds(self, taken: list[Taken]) -> None:
        """One contender in memory."""
        rounds = self.plan.rounds
        for index in range(rounds):
            for one in taken if index % 2 == 0 else reversed(taken):
                contender = None if one.error else self._ready(one)
                if contender is not None:
                    with _failing(one, self.runtime), _frozen_garbage():
                        for _ in range(-(-self.plan.iters // rounds)):
                            self._time(one, contender)
                del contender
                self.resident_mb.pop(one.way, None)
                _forget_compiled([one.way])
                _clear(self.runtime)

    def _ready(self, one: Taken) -> Contender | None:
        """Built, checked and warmed up; ``None`` if that failed."""
        if one.error:
            return None
        contender = None
        with _failing(one, self.runtime):
            peak = self._peak_mb(one) * MB
            contender = build(self.recipe, one.way, self.runtime, peak)
            self._check(one, contender)
            if not one.error:
                ids = self._ids(contender)
                for _ in range(self.plan.warmup):
                    contender.step(ids)
                contender.park()
                self.resident_mb[one.way] = contender.resident_bytes() / MB
        return None if one.error else contender

    def _check(self, one: Taken, contender: Contender) -> None:
        if self.plan.checks != "full":
            return
        ids = self._ids(contender)
        if not one.way.private:
            self._look_at_baseline(one, contender, ids)
        elif self.expected is not None:
            if any(check.what.startswith("full") for check in one.checks):
                return  # in an earlier round
            dtype = self.recipe.dtype
            rounding = self.rounding if one.way.compiles else 0.0
            found = full_check(contender, ids, self.expected, dtype, self.runtime, rounding)
            _judge(one, [found])

    def _look_at_baseline(self, one: Taken, contender: Contender, ids: Tensor) -> None:
        """What is right, and how far compiled non-private gradients are from it."""
        if self.expected is None and not one.way.compiles:
            bound = self.recipe.max_grad_norm
            self.expected = full_truth(contender, ids, bound, self.runtime)
            self.whole = whole_gradient(contender, ids) if self.compiles else None
        elif self.whole is not None and one.way.compiles:
            own, whole = whole_gradient(contender, ids), self.whole
            self.rounding = relative(own, whole, contender, self.runtime)
            self.whole = None

    def _peak_mb(self, one: Taken) -> float:
        """Of the non-private step that this one's budget is a share of, over all ranks."""
        budget = one.way.budget
        if budget is None:
            return 0.0
        peak = self.peaks_mb.get(one.way.baseline, 0.0)
        if budget.of_peak and not peak:
            raise RuntimeError(f"the peak of {one.way.baseline} is not known, so no share of it")
        one.budget_gib = round(budget.bytes(peak * MB) / GIB, 3)
        return peak

    def _ids(self, contender: Contender) -> Tensor:
        return contender.ids(self.cell.batch, self.cell.tokens)

    def _time(self, one: Taken, contender: Contender) -> None:
        runtime, device = self.runtime, self.runtime.device
        ids = self._ids(contender)
        cuda = device.type == "cuda"
        others = sum(mb for way, mb in self.resident_mb.items() if way != one.way) if cuda else 0.0
        reset_peak(device)
        runtime.barrier()
        took = milliseconds(lambda: contender.step(ids), device)
        seen = runtime.largest([took, peak_mb(device) - others])
        one.held = contender.held()
        contender.park()
        one.times_ms.append(seen[0])
        one.peak_mb = max(one.peak_mb, seen[1])
        if not one.way.private:
            self.peaks_mb[one.way] = one.peak_mb


def _judge(one: Taken, checks: list[Check]) -> None:
    one.checks += checks
    wrong = [str(check) for check in checks if not check.holds]
    if wrong:
        one.error, one.status = f"is wrong, and not reported: {'; '.join(wrong)}", "refused"
        one.times_ms, one.peak_mb = [], 0.0


@contextlib.contextmanager
def _failing(one: Taken, runtime: Runtime) -> Iterator[None]:
    """Note that it failed, on all ranks if on one, and go on with the others.

    If a rank waits for one that failed, the run ends after its timeout; what was written stays.
    """
    why, lacking = "", False
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        lacking = is_out_of_memory(error)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = f"out of memory: {first}" if lacking else f"{type(error).__name__}: {first}"
        if not lacking:
            traceback.print_exc()
    failed, memory = runtime.largest([float(bool(why)), float(lacking)])
    if failed:
        one.status = "out_of_memory" if memory else "failed"
        one.error = why or f"{one.status.replace('_', ' ')} on another rank"
        one.times_ms = []
        _clear(runtime)


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Models of other contenders make no collection of garbage slower."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _forget_compiled(ways: Iterable[Way]) -> None:
    """Dynamo holds on to models, and compiles no more than some of a kind."""
    if any(way.compiles for way in ways):
        torch._dynamo.reset()


def _clear(runtime: Runtime) -> None:
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
