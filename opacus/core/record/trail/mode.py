"""Tracks the unit of every row while a model runs, operation by operation.

Note [The trail]
    Each tensor that depends on the batch has a label (see ``labels.py``): the unit of each of its
    elements. An operation that only moves elements moves the label in the same way; one
    that computes gives its result the label of its operands, if each element is made of those of
    one unit. Where elements of several units meet, and where an operation is not known, the trail
    ends, with the reason: nothing is guessed.

    Labels have size 1 along features, and lie on the CPU as long as no index on an accelerator
    moves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opacus.core.platform.random_numbers import program_numbers
from opacus.core.platform.sharded import is_split, part_of
from opacus.core.record.trail.collectives import COLLECTIVES, of_part
from opacus.core.record.trail.computes import COMPUTES, OF_SHAPES, pointwise
from opacus.core.record.trail.labels import (
    ConflictError,
    Labels,
    Lost,
    NobodysRowsError,
    State,
    check_single,
    same_labels,
)
from opacus.core.record.trail.lines import LINES
from opacus.core.record.trail.memory import DATA, OUTSIDE, SHAPES, Memory
from opacus.core.record.trail.moves import MOVES
from opacus.core.record.trail.op import (
    UNWRITTEN,
    EndedError,
    Handler,
    Op,
    is_number,
    is_plain,
    tensors_in,
)
from opacus.core.record.trail.schema import (
    Reads,
    bound,
    is_pointwise,
    is_view,
    is_written,
    name_of,
)
from opacus.core.record.trail.shared_tensors import SharedTensors
from opacus.core.record.trail.writes import WRITES
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units, in_order, units_of

_HANDLERS: dict[str, Handler] = {**MOVES, **LINES, **WRITES, **COMPUTES, **COLLECTIVES}
_UNWRITTEN = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
# Operations whose result the program looks at.
_ANSWERS = frozenset(("_local_scalar_dense", "equal", "is_nonzero"))
UNFOLLOWED = Lost("memory that is read before torch has written to it")


class Trail(SharedTensors, TorchDispatchMode):
    """Labels of all tensors of one forward pass; active as a context manager.

    Args:
        inputs: Tensors that the model is given.
        count: Number of units n.
        dim: Dimension of the inputs with one entry for each unit.
    """

    def __init__(self, inputs: Iterable[Tensor], count: int, dim: int = 0) -> None:
        super().__init__()
        self.count = count
        self._memory = Memory()
        # Whether a layer's units depend on values, so that they have to be found anew each time.
        self.moved = False
        # Whether they depend on what may be other the next time: random numbers, lists, buffers.
        self.chosen = False
        # In how many operations a mask put elements into the rows of their units.
        self.placed = 0
        # Whether the program has looked at values, or drawn numbers, and may have gone on as they
        # say.
        self.decided = False
        self._numbers: object = None
        # Whether it has picked some of the units, or put them into an order, as they may have said.
        self.picked = False
        # In how many operations it has joined parts of several units in the order of their memory.
        self.joined = 0
        # Whether rows were taken to be the units', though nothing showed it.
        self.assumed = False
        self._reads = Reads()
        self._aside = False  # whether operations are the trail's own
        self._over = False
        # How often each layer was used on each unit, where its place in the batch said so.
        self._used: dict[str, tuple[LayerSpec, Tensor]] = {}
        self._start_sharing()
        for tensor in inputs:
            if is_plain(tensor):
                self._note_input(tensor, dim)

    def __enter__(self) -> Trail:
        self._reads.__enter__()
        self._numbers = program_numbers()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._over = True
        self._reads.__exit__(*error)
        self.decided |= self._reads.looked or program_numbers() != self._numbers

    def _note_input(self, tensor: Tensor, dim: int) -> None:
        own = dim if tensor.dim() > dim else 0
        if tensor.dim() > own and tensor.shape[own] == self.count:
            self._memory.put(tensor, Labels(self._in_order(tensor.dim(), own)), DATA)
        else:
            self._memory.put(tensor, None, DATA)

    def state(self, tensor: Tensor) -> State:
        """The label of a tensor; of one that is split over ranks, that of this rank's part."""
        local = part_of(tensor)
        state = self._memory.state(local) if is_plain(local) else None
        if isinstance(local, nn.Parameter) and isinstance(state, Lost) and not state.mixed:
            return None  # FSDP puts parameters into memory of its own, past torch's operations
        if local is not tensor and isinstance(state, Labels):
            return of_part(state, tensor.shape, local.shape)
        return state

    def mark(self, tensor: Tensor, state: State) -> None:
        """Whose a tensor is that comes from outside, unless that is known."""
        if self.state(tensor) is None:
            self._memory.put(tensor, state, DATA)

    def layer(
        self, spec: LayerSpec, inputs: Sequence[Tensor], output: Tensor, batch_dim: int
    ) -> Units | None:
        """The units of the output of a layer that has run; ``None`` if they are its rows.

        What is not known of it is assumed from here on: that its rows are the units. A later
        operation that contradicts this is refused, by the name of the layer.

        Raises:
            ValueError: The layer's rows are made of several units, or it is not known of which,
                and they are not as many.
            NobodysRowsError: They are computed from no input.
        """
        with self.aside():
            return self._layer(spec, inputs, output, batch_dim)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Operations in it are not the model's, nor is what is looked at."""
        self._aside, looked = True, self.looked
        try:
            yield
        finally:
            self._aside, self.looked = False, looked

    def _layer(
        self, spec: LayerSpec, inputs: Sequence[Tensor], output: Tensor, batch_dim: int
    ) -> Units | None:
        state = self._somebodys(output)
        if isinstance(state, Labels):
            whole = in_order(state.ids, self.count, batch_dim)
            if whole is not None:  # constants stand in for units of which nothing came here
                state = Labels(whole, spec, state.moved)
                self._memory.put(part_of(output), state, DATA)
            units = units_of(state.ids, output.shape, self.count, batch_dim)
            if units is not None and units.ids is not None and not state.moved:
                self._note_use(spec, units.ids)
            return units
        before = [self._somebodys(t) for t in inputs]
        mixed = next((s for s in [state, *before] if isinstance(s, Lost) and s.mixed), None)
        if mixed is not None:
            raise ValueError(
                f"{spec} is given rows that are of no single sample: {mixed.reason}. Its gradient "
                "has no part that belongs to one sample. Compute what it is given from one sample "
                "at a time, freeze the layer, or, if dimension 0 of the model's inputs is time, "
                "use batch_first=False"
            )
        rows = output.shape[batch_dim] if output.dim() > batch_dim else 0
        if rows != self.count:
            states = [state, *before]
            nobodys = state is None and all(s is None for s in states)
            reason = state.reason if isinstance(state, Lost) else "computed from no input"
            raise (NobodysRowsError if nobodys else ValueError)(
                f"{spec}, whose output is of shape {tuple(output.shape)}, gives {rows} rows in a "
                f"batch of {self.count} samples, and whose they are is not known ({reason}). Let "
                "the batch be the first dimension of its input (expand position ids to [batch, "
                "length], say), or freeze the layer"
            )
        self.assumed |= any(isinstance(s, Lost) for s in [state, *before])
        labels = Labels(self._in_order(output.dim(), batch_dim), assumed=spec)
        self._memory.put(part_of(output), labels, DATA)
        return None

    def same_rows(self, given: Tensor, output: Tensor) -> None:
        """What is computed of each row of a tensor, features apart, in a way that is not seen."""
        state = self.state(given)
        if isinstance(state, Labels) and state.ids.shape[-1] != 1:
            state = Lost("units lie along the features of a layer that computes in float8")
        self._memory.put(output, state, DATA)

    def came_back(self, given: Tensor, output: Tensor) -> bool:
        """Whether rows that values moved are in their places again; no choice is seen in them."""
        before, after = self.state(given), self.state(output)
        if given.shape != output.shape or not isinstance(before, Labels):
            return False
        with self.aside():
            same = isinstance(after, Labels) and same_labels(before.ids, after.ids)
        if same:
            self._memory.put(output, before, DATA)
        return same

    @property
    def looked(self) -> tuple[bool, bool]:
        """Whether the program has looked at values, in either way."""
        return self.decided, self._reads.looked

    @looked.setter
    def looked(self, looked: tuple[bool, bool]) -> None:
        self.decided, self._reads.looked = looked

    def _somebodys(self, tensor: Tensor) -> State:
        """Whose a layer's rows are; nobody's, if values have picked none of any unit."""
        state = self.state(tensor)
        if isinstance(state, Labels):
            self.moved |= state.moved
            if state.ids.numel() and not bool((state.ids >= 0).any()):
                return None
        return state

    def _note_use(self, spec: LayerSpec, ids: Tensor) -> None:
        used = ids[ids >= 0].bincount(minlength=self.count).cpu()
        _, before = self._used.get(spec.name, (spec, torch.zeros_like(used)))
        self._used[spec.name] = spec, before + used

    def check(self, outputs: Sequence[Tensor]) -> None:
        """Check the whole forward pass of a model that has given ``outputs``.

        Raises:
            ValueError: A layer ran on some samples more often for their place in the batch alone,
                or an output with a row for each sample mixes them.
        """
        for spec, used in self._used.values():
            if int(used.min()) != int(used.max()):
                raise ValueError(
                    f"{spec} runs more often on some samples than on others, by their place in "
                    "the batch (a slice such as h[5:]), so a sample's gradient depends on how many "
                    "others there are: choose by what is in a sample (a mask), or freeze the layer"
                )

        for output in outputs:
            state = self.state(output)
            rows = output.requires_grad and self.count in output.shape[:2]
            self.moved |= rows and isinstance(state, Labels) and state.moved
            self.assumed |= isinstance(state, Lost)
            if rows:
                check_single(output, state)

    def check_alone(self, outputs: Sequence[Tensor]) -> None:
        """Check a forward pass on one sample, whose outputs may have any shape.

        Raises:
            ValueError: One is made of what is not the sample's.
        """
        for output in outputs:
            if output.requires_grad:
                check_single(output, self.state(output))

    def follows_from_data(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from the batch, be it by which of its places were set."""
        if self.state(tensor) is not None:
            return True
        return is_plain(tensor) and self._memory.source(tensor) == DATA

    # --- operations ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_split(types):  # the operations that it runs on this rank's parts come here then
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._aside:
            return result
        schema = getattr(func, "_schema", None)
        if schema is None:  # an operator that runs others
            self._end(args, kwargs, result, str(func))
            return result
        name, in_place = name_of(schema)
        arguments = bound(schema, args, kwargs or {})
        source = self._source(func, name, arguments)
        if source != SHAPES and (name in _ANSWERS or torch.Tag.dynamic_output_shape in func.tags):
            self.decided = True
        if name in _ANSWERS:
            return result
        written = [arguments[a.name] for a in schema.arguments if is_written(a)]
        results = [t for t in tree_leaves(result) if is_plain(t)]
        concerns = True
        if name in _UNWRITTEN:
            states: Sequence[State] = [UNWRITTEN] * len(results)
        elif self._concerns(arguments.values(), written):
            states = self._follow(func, name, arguments, result, results)
        else:
            states, concerns = [None] * len(results), False
        self._note(schema, in_place, concerns, written, results, states, source)
        return result

    def _source(self, func: Any, name: str, arguments: dict[str, Any]) -> int:
        """What the values of an operation's results depend on."""
        own = OUTSIDE if torch.Tag.nondeterministic_seeded in func.tags else SHAPES
        if name in OF_SHAPES:
            return own
        return max([own, *map(self._memory.source, tensors_in(arguments.values()))])

    def _concerns(self, arguments: Iterable[Any], written: Sequence[Any]) -> bool:
        """Whether an operation reads what depends on the batch, or writes to it."""
        targets = {id(t) for t in tensors_in(written)}
        states = [(t, self.state(t)) for t in tensors_in(arguments)]
        return any(
            state is not None and not (state is UNWRITTEN and id(t) in targets)
            for t, state in states
        )

    def _note(
        self,
        schema: Any,
        in_place: bool,
        concerns: bool,
        written: Sequence[Any],
        results: Sequence[Tensor],
        states: Sequence[State],
        source: int,
    ) -> None:
        """What results are now, and what was changed in place."""
        put = self._memory.view if is_view(schema) else self._memory.put
        for tensor, state in zip(results, states, strict=True):
            (self._memory.write if in_place else put)(tensor, state, source)
        if in_place:
            return
        state = Lost(f"{schema.name} writes to a tensor") if concerns else None
        for tensor in tensors_in(written):
            if is_plain(tensor) and not any(tensor is result for result in results):
                self._memory.write(tensor, state, source)

    def _follow(
        self,
        func: Any,
        name: str,
        arguments: dict[str, Any],
        result: Any,
        results: Sequence[Tensor],
    ) -> Sequence[State]:
        """The states of the results of an operation on tensors of the batch."""
        if is_view(func._schema) and self.state(next(iter(arguments.values()))) is UNWRITTEN:
            return [UNWRITTEN] * len(results)
        handler = _HANDLERS.get(name)
        if handler is None and is_pointwise(func):
            handler = pointwise
        if handler is None or torch.Tag.inplace_view in func.tags:
            return [Lost(f"the operation {name} is not followed")] * len(results)
        op = Op(name, arguments, result, self.state, self._memory.source, self.count)
        try:
            with torch.no_grad():
                found = handler(op)
        except EndedError as end:
            found = end.state if not end.state.unwritten else UNFOLLOWED
        except ConflictError as conflict:
            found = self._mixed(name, conflict, arguments, results)
        except (RuntimeError, LookupError, TypeError, ValueError, StopIteration):
            found = Lost(f"the operation {name} could not be followed")
        self.chosen |= op.chosen
        self.placed += op.placed
        self.picked |= op.picked
        self.joined += op.joined
        states = found if isinstance(found, (list, tuple)) else [found] * len(results)
        missing = Lost(f"a further result of {name}")
        padded = [*states, *[missing] * (len(results) - len(states))]
        return [_fitting(t, s, name) for t, s in zip(results, padded, strict=False)]

    def _mixed(
        self, name: str, conflict: ConflictError, arguments: Any, results: Sequence[Tensor]
    ) -> Lost:
        """Elements of several units have met in an operation.

        Raises:
            ValueError: It was a layer's output whose rows were assumed to be the units.
        """
        differentiable = torch.is_grad_enabled() and any(
            t.requires_grad for t in tensors_in(arguments.values())
        )
        if conflict.layers and differentiable and any(is_number(t) for t in results):
            raise ValueError(
                f"what comes from {conflict.layers[0]} is combined (by {name}) with the "
                f"{self.count} samples along another dimension than that of the samples: its rows "
                "are no samples, and it would be clipped by row. Give the layer one row for all "
                "samples (unsqueeze(0)) or one for each (expand), or freeze it"
            )
        return Lost(f"{name} makes one element of those of several samples", mixed=True)

    def _end(self, args: Any, kwargs: Any, result: Any, name: str) -> None:
        leaves = [t for t in tree_leaves((args, kwargs)) if is_plain(t)]
        if any(self.state(t) is not None for t in leaves):
            for tensor in tree_leaves(result):
                if is_plain(tensor):
                    self._memory.put(tensor, Lost(f"the operation {name} is not followed"), DATA)


def _fitting(tensor: Tensor, state: State, name: str) -> State:
    """``state``, if it can be that of the tensor."""
    if not isinstance(state, Labels):
        return state
    own, shape = state.ids.shape, tensor.shape
    if len(own) == len(shape) and all(o in (1, n) for o, n in zip(own, shape, strict=True)):
        return state
    return Lost(f"the operation {name} could not be followed")
