"""Measures units of a batch together and each one alone; see :mod:`opacus.core.isolation.check`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from opacus.core.isolation.incomparable import (
    HIDDEN,
    RANDOM,
    RUN_ERRORS,
    IncomparableError,
    cannot,
    is_theirs,
)
from opacus.core.isolation.left_tensors import Remains, depend_on_samples, versions
from opacus.core.isolation.left_values import LeftValues, kept, put_values, that_differ
from opacus.core.isolation.squares import (
    STATES,
    Norms,
    as_lists,
    column,
    floats,
    square,
    tolerance_of,
)
from opacus.core.isolation.undisturbed import (
    RandomNumbers,
    same_state,
    undisturbed,
    without_dropout,
)
from opacus.core.norms.ledger import NormLedger
from opacus.core.platform.memory import free_memory
from opacus.core.platform.sharded import compute_device
from opacus.core.privacy.gradients import has_hooks
from opacus.core.record.aside import aside, others
from opacus.core.record.changes import Start as Changed
from opacus.core.record.layers import Layer
from opacus.core.record.named import NamedUnits
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder

CHOSEN = 3  # units that are run alone
_FULL_ELSEWHERE = (
    "another rank ran out of memory as samples of its batch were run again, to compare them. "
    "Nothing was released"
)
V = TypeVar("V")
# What a backward pass starts from: tensors and their gradients.
Start = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Difference:
    """A unit that is not the same alone."""

    unit: int
    where: str
    together: float
    alone: float


class Runs(Protocol):
    """A way to run the model on some units of a batch."""

    @property
    def count(self) -> int:
        """Number of units to choose from."""

    @property
    def most(self) -> int:
        """So many rows the model is known to run on."""

    @property
    def counts(self) -> bool:
        """Whether these are units of a batch, rather than made up to go along with other ranks."""

    @property
    def relies(self) -> bool:
        """Whether rows are taken to be those of the units that they were in training."""

    @property
    def changed(self) -> Changed | None:
        """What the pass was the first to change, as it was before."""

    @property
    def stand_in(self) -> Runs | None:
        """Runs on one unit that is made up, beside the only one of a batch, if that can be."""

    def start(self, places: Sequence[int]) -> Start:
        """Run the model on these units; the sum over them of what each unit trains on."""

    def unit(self, place: int) -> int:
        """The number that a unit has in its batch."""

    def named(self, places: Sequence[int]) -> NamedUnits | None:
        """Whose the tokens are in a run on these units; ``None``: row i is unit i."""


class Probe:
    """Compares units of a batch; the model and its training state are as before afterwards.

    Together, units are measured as in training: taps, rules, norms. Alone, a unit is measured
    by plain autograd, without any of these, where no rank communicates gradients in it; by the
    same means as together otherwise.

    Args:
        model: The model.
        recorder: Its recorder.
        plain: Whether plain autograd may run backward.
        any_rank: Whether something is true on some rank that takes part.

    Attributes:
        finite: Whether all that the latest run had to compare could be: no unit shows anything
            where numbers are too large for half precision, or one that the model keeps is NaN.
        kept: Names of tensors of the model that the latest run found to depend on samples.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        *,
        plain: bool,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._plain = plain and not any(has_hooks(p) for p in model.parameters())
        self._any_rank = any_rank
        self._order: list[str] = []  # layers, in the order of the forward pass
        self._dtypes: set[torch.dtype] = set()  # of what layers see
        self._left: dict[int, Remains] = {}  # what runs on each unit alone have left
        self.finite, self.kept = True, set[str]()
        self._spares = False

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """Uses of a layer wait for each other only where they must: less memory, more time."""
        self._spares = True
        try:
            yield
        finally:
            self._spares = False

    def run(self, runs: Runs, dtypes: Collection[torch.dtype] = ()) -> list[Difference]:
        """The units that are another alone, none if all is well.

        Args:
            runs: Runs the model.
            dtypes: Types that it computes in, besides those of its parameters and of what its
                layers see.

        Raises:
            IncomparableError: The model cannot be run on single units, or draws random numbers
                of its own; on all ranks alike.
        """
        self._dtypes, self.finite, self.kept = set(dtypes), True, set()
        with ExitStack() as stack:
            for other in others(self._recorder):
                stack.enter_context(other.paused())
            stack.enter_context(undisturbed(self._model))
            stack.enter_context(without_dropout(self._model))
            if runs.changed is not None:
                runs.changed.put_back()
            return self._compare(runs)

    def _compare(self, runs: Runs) -> list[Difference]:
        numbers = RandomNumbers(self._model)
        every: Sequence[int] = range(runs.count)
        together = self._attempt(runs, partial(self._tapped, runs, every))
        smaller = is_theirs(together) and runs.most > runs.count
        if self._any_rank(smaller):  # it may take batches of one size only
            numbers.again()
            every = [place % runs.count for place in range(max(runs.count, runs.most))]
            together = self._attempt(runs, partial(self._tapped, runs, every))
        if isinstance(together, Exception):
            refused = not (isinstance(together, IncomparableError) or is_theirs(together))
            if self._any_rank(refused):
                return [Difference(-1, str(together), math.nan, math.nan)] if refused else []
            raise IncomparableError(cannot(together, f"{runs.count} samples")) from together
        chosen = _telling(together, runs.count)
        if not self._plain:  # as many runs on each rank
            chosen = (chosen * CHOSEN)[:CHOSEN]
        alone = [self._alone(runs, place, len(every)) for place in chosen]
        if runs.counts and (runs.changed is not None or not numbers.drawn()):
            self.kept = depend_on_samples(self._left[place].tensors for place in chosen)
        tolerance = tolerance_of(self._model, self._dtypes)
        differing: list[tuple[int, Difference]] = []
        for number, place in enumerate(chosen):
            one, unit = column(together, place), runs.unit(place)
            found = self._differences(unit, one, alone[number], tolerance)
            differing += [(number, difference) for difference in found if runs.counts]
        if self._any_rank(bool(differing)):
            number = differing[0][0] if differing else 0
            again = self._alone(runs, chosen[number], len(every))
            random = bool(self._differences(0, alone[number], again, tolerance))
            if self._any_rank(random or numbers.drawn()):
                return self._beside_copies(runs, chosen[number], every, together, numbers)
            return [difference for _, difference in differing]
        return self._kept(runs, chosen, numbers)

    def _kept(self, runs: Runs, chosen: Sequence[int], numbers: RandomNumbers) -> list[Difference]:
        """Whether a unit is another after a run on one unit than after a run on another."""
        left = self._all_left(runs, chosen)
        if len(left) > len(chosen) and not numbers.drawn():
            self.kept = depend_on_samples(one.tensors for one in left)
        pair = that_differ([one.values for one in left]) if runs.counts else []
        if not self._any_rank(bool(pair)):
            return []

        def after(left: LeftValues) -> dict[str, float]:
            numbers.again()
            with same_state(self._model):
                put_values(left)
                return self._alone(runs, chosen[0], runs.count)

        first, second = pair or ({}, {})
        one, two, again = after(first), after(second), after(first)
        tolerance = STATES * tolerance_of(self._model, self._dtypes)
        differing = self._differences(-1, one, two, tolerance)
        if not pair or not differing or self._differences(-1, one, again, tolerance):
            return []
        return [Difference(-1, kept(self._model, first, differing[0].where), math.nan, math.nan)]

    def _all_left(self, runs: Runs, chosen: Sequence[int]) -> list[Remains]:
        """What runs on these units have left; beside the only one of a batch, on another one."""
        left = [self._left[place] for place in chosen]
        other = runs.stand_in
        lone = runs.counts and runs.count == 1 and other is not None
        if self._any_rank(lone) and other is not None:  # as many runs on each rank
            self._left.clear()
            self._attempt(other, partial(self._one, other, [0]))
            left += self._left.values()
        return left

    def _beside_copies(
        self,
        runs: Runs,
        place: int,
        every: Sequence[int],
        together: Norms,
        numbers: RandomNumbers,
    ) -> list[Difference]:
        """Whether a unit is another beside copies of itself, where it gets the same numbers.

        In a batch of another size it gets other ones.

        Args:
            runs: Runs the model.
            place: Of the unit.
            every: Those of the units that ran together.
            together: Norms of all units, measured with these numbers.
            numbers: Random ones.

        Raises:
            IncomparableError: It is not, or differs from itself even in the same batch, with random
                numbers or without any, or how many numbers are drawn depends on values (RReLU's on
                a CPU), so that it gets others.
        """
        if self._any_rank(runs.named(every) is not None):  # of tokens, which are no copies' own
            raise IncomparableError(RANDOM)
        tolerance = tolerance_of(self._model, self._dtypes)

        def differences(places: Sequence[int], compared: Iterable[int]) -> list[Difference]:
            numbers.again()
            found = self._attempt(runs, partial(self._tapped, runs, places))
            if isinstance(found, Exception):
                raise IncomparableError(RANDOM)
            pairs = [(runs.unit(every[p]), column(together, p), column(found, p)) for p in compared]
            all_found = [self._differences(*pair, tolerance) for pair in pairs]
            return [one for some in all_found for one in some if runs.counts]

        own = differences(every, range(len(every)))  # it has a generator of its own
        after = RandomNumbers(self._model)
        if self._any_rank(bool(own) and not numbers.drawn()):
            raise IncomparableError(HIDDEN)
        beside = differences([place] * len(every), [place])
        comparable = not self._any_rank(bool(own) or after.drawn())
        if not comparable or not self._any_rank(bool(beside)):
            raise IncomparableError(RANDOM, compared=comparable)
        return beside

    # --- one run ---

    def _attempt(self, runs: Runs, run: Callable[[], dict[str, V]]) -> dict[str, V] | Exception:
        """What a run gives, or the error that stopped it; an error on all ranks or on none.

        Raises:
            OutOfMemoryError: Some rank ran out of memory, which says nothing of the model; on all
                ranks alike.
        """
        found: dict[str, V] = {}
        error: Exception | None = None
        try:
            found = run()
        except (IncomparableError, *RUN_ERRORS) as caught:
            error = caught
        full = error if isinstance(error, torch.OutOfMemoryError) else None
        if self._any_rank(full is not None):
            raise full or torch.OutOfMemoryError(_FULL_ELSEWHERE)
        own = error if runs.counts else None  # made up: whether that runs means nothing
        if self._any_rank(own is not None):
            return own or IncomparableError("it cannot be run on another rank")
        return found

    def _tapped(self, runs: Runs, places: Sequence[int]) -> Norms:
        """Norms by the taps."""
        recorder = self._recorder
        # Uses of a layer wait for each other, as long as there is room.
        device = compute_device(next(self._model.parameters()))
        most = 0 if self._spares else _room(device)
        ledger = NormLedger(len(places), deferred=True, budget_bytes=most)
        refusals: list[Exception] = []

        def sink(record: Record) -> None:
            self._dtypes.update([t.dtype for t in record.tensors])
            try:
                with recorder.paused():  # a rule may run the layer again
                    ledger.add(record)
            except (RuntimeError, ValueError) as error:
                refusals.append(error)  # raised when all layers are through: other ranks wait

        with same_state(self._model), aside(recorder, sink, relies=runs.relies):
            recorder.passes.name_units(runs.named(places))
            before = versions(self._model)
            tensors, grads = runs.start(places)
            self._order = recorder.passes.uses
            with recorder.backward():
                torch.autograd.backward(tensors, grads)
            if refusals:
                raise refusals[-1]  # of the layer that comes first in the forward pass
            self._left[places[0]] = Remains(self._model, before)
            with recorder.paused(), torch.no_grad():
                return as_lists(ledger.finish())

    def _alone(self, runs: Runs, place: int, together: int) -> dict[str, float]:
        """Norms of one unit; of so many copies of it, if it can be run on no fewer rows."""
        reason = ""
        for copies in dict.fromkeys((1, 2, together)):
            places = [place] * copies
            one = self._attempt(runs, partial(self._one, runs, places))
            if not isinstance(one, Exception):
                return one
            reason = reason or cannot(one, "one sample")
        raise IncomparableError(reason)

    def _one(self, runs: Runs, places: list[int]) -> dict[str, float]:
        if not self._plain:
            return column(self._tapped(runs, places), 0)
        self._model.zero_grad(set_to_none=True)  # of what is used outside its layer
        with same_state(self._model), self._recorder.paused():
            before = versions(self._model)
            tensors, grads = runs.start(places)
            torch.autograd.backward(tensors, grads)
            self._left[places[0]] = Remains(self._model, before)
        squares: dict[str, Tensor] = {}
        layers = self._recorder.layers
        unheld = {layer.owners[local] for layer in layers for local in layer.unheld}
        # A wrapper that was put around a part since then has changed the names in the model.
        known = {id(x.parameter(local)): owner for x in layers for local, owner in x.owners.items()}
        for now, parameter in self._model.named_parameters():
            name = known.get(id(parameter), now)
            grad, parameter.grad = parameter.grad, None
            if grad is not None and name not in unheld:
                squares[name] = square(grad) / len(places) ** 2
        return dict(zip(squares, floats(list(squares.values())), strict=True))

    # --- comparing ---

    def _differences(
        self, unit: int, one: Mapping[str, float], two: Mapping[str, float], tolerance: float
    ) -> list[Difference]:
        """The first layer at which squared norms differ, as a list of one or none."""
        whole = max(sum(one.values()), sum(two.values()))
        if not math.isfinite(sum(one.values()) + sum(two.values())):
            self.finite = False
            return []
        floor = 0.1 * tolerance * math.sqrt(whole)
        differing: dict[str, tuple[float, float]] = {}
        for name in one.keys() | two.keys():
            a, b = (math.sqrt(max(n.get(name, 0.0), 0.0)) for n in (one, two))
            if abs(a - b) > tolerance * max(a, b) + floor:
                differing[name] = (a, b)
        if not differing:
            return []
        where, name = self._first(differing)
        return [Difference(unit, where, *differing[name])]

    def _first(self, differing: Mapping[str, Any]) -> tuple[str, str]:
        """The first layer in the forward pass that has one of these parameters."""
        layers = {layer.spec.name: layer for layer in self._recorder.layers}
        ordered = [layers[n] for n in self._order if n in layers]
        ordered += [layer for layer in self._recorder.layers if layer not in ordered]
        for layer in ordered:
            for owner in layer.owners.values():
                if owner in differing:
                    return f"{_described(layer)}, parameter '{owner}'", owner
        name = next(iter(differing))
        return f"parameter '{name}'", name


def _room(device: torch.device) -> int | None:
    """Bytes of output gradients that may wait, and their layers' inputs with them."""
    return free_memory(device) // 4 if device.type == "cuda" else None


def _telling(norms: Norms, count: int) -> list[int]:
    """The units with the largest and the smallest finite norm, and one between."""
    totals = [sum(values[place] for values in norms.values()) for place in range(count)]
    finite = (p for p in range(count) if 0 < totals[p] < math.inf)
    order = sorted(finite, key=lambda p: totals[p])
    order = order or list(range(count))
    return list(dict.fromkeys(order[i] for i in (-1, 0, len(order) // 2)))


def _described(layer: Layer) -> str:
    return f"layer '{layer.spec.name}' ({layer.spec.kind.__name__})"
