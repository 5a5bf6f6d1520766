"""Detects ranks that run different FSDP2 units before they wait for each other for ever.

FSDP2 gathers a unit's parameters when the unit runs. Where one rank runs a unit and another
leaves it out, their next gathers are of different units: they hang, or, if the units are of one
size, mix their parameters up. Ranks compare the units that they come to while the model runs for
the first time, through the store, before each gather. From then on each rank compares with what
was agreed, by itself; only one that is about to do something else asks the others.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from opacus.core.platform.sharded import is_fsdp
from opacus.core.ranks.meeting import Meetings, Outcome, ranks_with

_END = "the end of the model"


class GatherOrder:
    """Watches the order of the units in each forward pass of the model.

    Costs a Python call for each unit. Ranks that change the order together (a layer that all
    of them drop) meet in the store each time.

    Args:
        model: The model, sharded by FSDP2.
    """

    # Seconds that a rank waits for others: in the first pass, when these may still be busy with
    # something else (their data, a compilation), and before it leaves the agreed order.
    FIRST_WAIT: ClassVar[float] = 600.0
    WAIT: ClassVar[float] = 60.0

    def __init__(self, model: nn.Module) -> None:
        units: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if module is not model and is_fsdp(module):
                units[name] = module  # type: ignore[assignment]
        self._names = [name.removeprefix("_module.") for name in units]
        self._meetings = Meetings(ranks_with(model), "units")
        self._agreed: dict[bool, list[int]] = {}
        self._passes = 0
        self._active = False
        self._training = True
        self._expected: list[int] = []
        self._next = 0
        self._seen: list[int] = []
        self._found = ""  # what this rank has refused
        self.handles: list[RemovableHandle] = []
        if self._names and len(self._meetings.ranks) > 1:
            self.handles = [
                model.register_forward_pre_hook(self._begin, prepend=True),
                model.register_forward_hook(self._end, always_call=True),
            ]
            self.handles += [
                unit.register_forward_pre_hook(_Entry(self, number), prepend=True)
                for number, unit in enumerate(units.values())
            ]

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._passes += 1
        self._active, self._training = True, module.training
        self._expected = self._agreed.get(module.training, [])
        self._next, self._seen = 0, []

    def enter(self, unit: int) -> None:
        """A unit is about to run, and so to be gathered."""
        if not self._active:  # a recomputation, or a part of the model by itself
            return
        if self._next < len(self._expected) and self._expected[self._next] == unit:
            self._next += 1
        else:
            self._compare(self._names[unit])
            if unit in self._expected[self._next :]:  # what is between was left out by all
                self._next = self._expected.index(unit, self._next) + 1
        self._seen.append(unit)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._active:
            return
        self._active = False
        if output is None:  # it failed, or was stopped
            return
        if self._next < len(self._expected) or self._training not in self._agreed:
            self._compare(_END)
        self._agreed.setdefault(self._training, list(self._seen))

    def _compare(self, place: str) -> None:
        first = self._training not in self._agreed
        wait = self.FIRST_WAIT if first else self.WAIT
        outcome = self._meetings.meet(f"{self._passes}.{len(self._seen)}", place, wait)
        if outcome.agreed:
            return
        self._active = False
        usual = self._names[self._expected[self._next]] if self._next < len(self._expected) else ""
        message = _message(outcome, "" if first else usual or _END, wait)
        self._meetings.announce(message)
        self._found = message
        raise RuntimeError(message)

    def explain(self, error: BaseException) -> None:
        """Raise what another rank has found, if that is why this one failed in a collective."""
        if self._found and self._found in str(error):
            return  # this rank has found it out, too; its own words say where it stands
        text = None if not self.handles else self._meetings.announced()
        if text is not None and text not in str(error):
            raise RuntimeError(text) from error


class _Entry:
    """The hook of one unit (an object, so that models can be copied and pickled)."""

    def __init__(self, order: GatherOrder, number: int) -> None:
        self.order = order
        self.number = number

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.order.enter(self.number)


def _message(outcome: Outcome, usual: str, wait: float) -> str:
    places: dict[str, list[int]] = {}
    for rank, place in outcome.said.items():
        places.setdefault(place or "", []).append(rank)
    absent = places.pop("", [])
    said = "; ".join(f"{_ranks(ranks)} at '{place}'" for place, ranks in places.items())
    if absent and usual:
        said += (
            f"; {_ranks(absent)} did not come there within {wait:g} s: as in passes before, "
            f"'{usual}' comes next there"
        )
    elif absent:
        said += f"; {_ranks(absent)} did not come to any within {wait:g} s"
    return (
        f"ranks run different FSDP2 units in the same forward pass (this is rank "
        f"{dist.get_rank()}): {said}. A unit is gathered when it runs, so ranks that leave it out "
        "make the others wait for ever. Let such a branch belong to a unit that always runs (do "
        "not call fully_shard on it), or run it on every rank, on zero rows where there are none"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
