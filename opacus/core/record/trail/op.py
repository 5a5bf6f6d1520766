"""One operation of torch as the trail sees it, and the handlers' common ground."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.core.record.trail.labels import Labels, Lost, State, agree, lifted
from opacus.core.record.trail.memory import DATA, OUTSIDE

UNWRITTEN = Lost("memory that was written to past torch's operations", unwritten=True)


class Op:
    """An operation that has run.

    Args:
        name: Without overload and without the underscore of in-place variants.
        arguments: By the names of the schema, defaults included.
        result: What it returned.
        state: Whose a tensor's elements were before it ran.
        source: What a tensor's values follow from; see :mod:`opacus.core.record.trail.memory`.
        count: Number of units in the batch.

    Attributes:
        chosen: Whether values that may be others the next time have moved elements of units.
        picked: Whether the program has picked some of the units, or put them into an order.
        joined: Whether it has joined parts of several units again, in the order in which they lie.
        placed: Whether a mask has put elements into the rows of their units; see ``placed.py``.
        hidden: Whether it runs without gradients: a reentrant checkpoint may run it again.
    """

    __slots__ = (
        "arguments", "chosen", "count", "hidden", "joined", "name", "picked", "placed", "result",
        "source", "state",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        result: Any,
        state: Callable[[Tensor], State],
        source: Callable[[Tensor], int],
        count: int,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.result = result
        self.state = state
        self.source = source
        self.count = count
        self.chosen = self.picked = self.placed = self.joined = False
        self.hidden = not torch.is_grad_enabled()

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """An argument, ``None`` if this variant has none of that name."""
        return self.arguments.get(name)

    @property
    def main(self) -> Tensor:
        """The first argument that is a tensor."""
        return next(a for a in self.arguments.values() if isinstance(a, Tensor))

    @property
    def results(self) -> Sequence[Tensor]:
        """What it returned, one or several."""
        return [self.result] if isinstance(self.result, Tensor) else self.result

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.results[0]

    def dim(self, name: str = "dim") -> int:
        """An argument that names a dimension of the main tensor, from the front."""
        return int(self[name]) % max(1, self.main.dim())

    def dims(self, name: str = "dim") -> list[int]:
        """One that names some of them; all, if it is left out."""
        given, count = self.get(name), self.main.dim()
        if given is None or (isinstance(given, (list, tuple)) and not given):
            return list(range(count))
        some = given if isinstance(given, (list, tuple)) else [given]
        return [int(d) % max(1, count) for d in some]

    def known(self, tensor: Tensor) -> Labels | None:
        """The label of an operand, ``None`` for nobody's.

        Raises:
            EndedError: That is not known.
        """
        state = self.state(tensor)
        if isinstance(state, Lost):
            raise EndedError(state)
        return state

    def tracked(self, tensor: Any) -> bool:
        """Whether the values of a tensor, which say where elements go, depend on units' data."""
        source = self.source(tensor) if isinstance(tensor, Tensor) else 0
        self.chosen |= source == OUTSIDE
        return source == DATA


class EndedError(Exception):
    """An operand's trail has ended, and with it that of the result."""

    def __init__(self, state: Lost) -> None:
        super().__init__(state.reason)
        self.state = state


# The state of all results, or one for each.
Handler = Callable[[Op], "State | Sequence[State]"]
# What one tensor's labels become.
OfOne = Callable[[Op, Labels], "Labels | Sequence[State]"]


def of_main(function: OfOne) -> Handler:
    """A handler of operations whose result is made of one tensor."""

    def handle(op: Op) -> State | Sequence[State]:
        labels = op.known(op.main)
        return None if labels is None else function(op, labels)

    return handle


def together(op: Op, operands: Sequence[Tensor]) -> State:
    """What is computed from one element of each operand, broadcast.

    Numbers that are no floats (masks, positions) say whose a result is only where no others do:
    what is selected by a mask is whose it was.

    Raises:
        EndedError: The trail of an operand has ended.
        ConflictError: They are of several units.
    """
    states = [(t, op.state(t)) for t in operands]
    for tensor, state in states:
        if isinstance(state, Lost) and (is_number(tensor) or state.mixed):
            raise EndedError(state)
    parts = {
        numbers: [s for t, s in states if isinstance(s, Labels) and is_number(t) is numbers]
        for numbers in (True, False)
    }
    found = [agree(some) for some in parts.values() if some]
    if found:
        agree(found)
        labels = found[0]
        return labels.with_ids(lifted(labels.ids, max(t.dim() for t in operands)))
    lost = next((s for _, s in states if isinstance(s, Lost)), None)
    if lost is not None:
        raise EndedError(lost)
    return None


def is_number(tensor: Tensor) -> bool:
    """Whether gradients may flow through a tensor."""
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments, in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, Tensor)]
    return found


def is_plain(tensor: Any) -> bool:
    """Whether this is an ordinary tensor (not one of DTensor's kind)."""
    return type(tensor) in (Tensor, torch.nn.Parameter)
