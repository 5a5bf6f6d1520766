"""The data to run a block of the model again: its arguments, and its output's gradient.

Note [Visits]
    Hooks on the blocks keep the arguments of each run of a block, which autograd or a
    checkpoint keeps as well, until its backward pass is over; and the gradient of its output.
    With both the block alone can run forward and backward once more after the whole backward pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus.core.platform.held import HeldModule
from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import number_of_backward
from opacus.core.record.layers import Layer
from opacus.core.record.passes import ForwardPass
from opacus.core.record.record import Record
from opacus.core.record.shared import Shared
from opacus.core.record.taps import Taps
from opacus.core.rules.spec import layer_kind

# Shapes that are remembered of a block.
MOST_KNOWN = 100
_PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


class Block:
    """A part of the model that owns its parameters alone, and that can be run by itself."""

    def __init__(self, module: nn.Module, layers: Sequence[Layer]) -> None:
        self.held = HeldModule(module)
        self.names = frozenset(layer.spec.name for layer in layers)
        self.owners = frozenset(owner for layer in layers for owner in layer.owners.values())
        self.held_before: dict[Hashable, int] = {}
        self.backprops_before: dict[Hashable, int] = {}
        self.elements = sum(layer.spec.elements for layer in layers)

    def remember(self, visit: Visit) -> None:
        """What the block needs, and what is held of it, when it is given these shapes."""
        _put(self.backprops_before, visit.shapes, visit.backprops)
        if not visit.chosen:
            _put(self.held_before, visit.shapes, visit.held)

    @property
    def module(self) -> nn.Module:
        """The part itself."""
        return self.held()


class Visit:
    """One run of a block.

    Attributes:
        names: Layers whose records were measured, and are had again from a replay.
        owners: Their parameters.
        held: Bytes that are held of the block's records.
        freed: Those that are free when its sums have been formed, which take memory themselves.
        seen: Bytes of all its records so far.
        backprops: Those of them that came in the backward pass.
        chosen: Whether the block is replayed.
        stays: Whether it is known that it is not.
        leaves: Whether what is kept of its records is sent to host memory.
        shapes: Of the tensors that it was given.
    """

    def __init__(self, block: Block, forward_pass: ForwardPass, args: Any, kwargs: Any) -> None:
        self.block, self.forward_pass = block, forward_pass
        self.names: set[str] = set()
        self.owners: set[str] = set()
        self.held = self.freed = self.seen = self.backprops = 0
        self.chosen = self.stays = self.leaves = False
        leaves = tree_leaves((args, kwargs))
        self.possible = all([isinstance(leaf, _PLAIN) for leaf in leaves])
        self.arguments: Any = (args, kwargs) if self.possible else None
        self._given = [t for t in leaves if isinstance(t, Tensor)] if self.possible else []
        self.gradient: Tensor | None = None
        self.shapes = tuple([t.shape for t in self._given])
        self.versions = self.versions_now()
        self.random = _random_state()
        self.autocast = _autocast(leaves)

    def let_go(self) -> None:
        """It is not run again."""
        self.possible = False
        self.arguments = self.gradient = None
        self._given = []

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the gradient of its output."""
        assert self.gradient is not None
        return self.gradient.device, self.gradient.dtype

    @property
    def tokens(self) -> int:
        """Rows of features that it computed."""
        assert self.gradient is not None
        return self.gradient.numel() // max(1, self.gradient.shape[-1])

    @property
    def given(self) -> int:
        """Bytes of its arguments, which are there anyway until its backward pass is over."""
        return sum([t.nbytes for t in self._given])

    @property
    def bytes(self) -> int:
        """The tensors that a replay needs."""
        return sum([t.numel() * t.element_size() for t in self._tensors()])

    def run(self) -> Tensor:
        """Run the block forward as it ran; layers are tapped as the recorder's state asks for.

        Nobody asks for the gradient of what it was given, so none is formed: taps have their place
        in the graph without it.

        Raises:
            RuntimeError: What it was given has been changed in place.
        """
        if self.versions_now() != self.versions:
            raise RuntimeError(
                "what a block of the model was given, or the gradient of its output, was changed "
                "in place, so that it cannot be run again: leave held_budget and memory_budget "
                "unset"
            )
        args, kwargs = tree_map_only(Tensor, Tensor.detach, self.arguments)
        cpu, gpu = self.random
        devices = [] if gpu is None else [torch.cuda.current_device()]
        with torch.random.fork_rng(devices), torch.enable_grad(), self.autocast():
            torch.set_rng_state(cpu)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)
            output = self.block.module.forward(*args, **kwargs)
        found = _grown(output)
        if len(found) != 1:
            raise RuntimeError(
                "a block of the model had one result with a gradient, and when it runs again for "
                f"the clipped sum it has {len(found)} (reentrant checkpoints do that): leave "
                "held_budget and memory_budget unset"
            )
        return found[0]

    def versions_now(self) -> list[int]:
        """Version counters of its arguments and of its output's gradient."""
        return [t._version for t in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return self._given if self.gradient is None else [*self._given, self.gradient]


class Blocks:
    """Keeps the visits of a running step.

    Args:
        recorder: Knows whether the model is recorded, and which call of it runs.
        found: The blocks.
    """

    def __init__(self, recorder: Taps, found: Iterable[Block]) -> None:
        self.found = list(found)
        self._recorder = recorder
        self._open: dict[int, Visit] = {}
        self._ran: weakref.WeakValueDictionary[int, Visit] = weakref.WeakValueDictionary()
        self.current: Visit | None = None  # the block that the backward pass is in
        self.chosen: list[Visit] = []
        self.handles: list[Any] = []
        for block in self.found:
            before = functools.partial(self._before, block)
            self.handles += [
                block.module.register_forward_pre_hook(before, with_kwargs=True),
                block.module.register_forward_hook(self._after, prepend=True),
            ]

    def remove(self) -> None:
        """Take the hooks off."""
        while self.handles:
            self.handles.pop().remove()

    def start(self) -> None:
        """A backward pass begins."""
        self.current, self.chosen = None, []

    def over(self) -> None:
        """The backward pass is over, or leaves the block that it was in."""
        last, self.current = self.current, None
        if last is not None and not last.chosen:
            last.let_go()

    @property
    def waiting(self) -> int:
        """Number of blocks that have run and whose backward pass has not begun."""
        return len(self._ran)

    @property
    def given(self) -> int:
        """Bytes of what those were given."""
        return sum(visit.bytes for visit in self._ran.values())

    def of(self, record: Record) -> Visit | None:
        """The visit of a record, if running the block again gives the record again."""
        visit = self.current
        if visit is None or not visit.possible or record.spec.name not in visit.block.names:
            return None
        own = visit.forward_pass
        again = record.forward_pass is own and record.spec.name not in own.moved
        return visit if again else None

    def _before(self, block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled graph runs no Python for a block
            return
        recorder = self._recorder
        current, carried = recorder.passes.current, recorder.carried
        if current is None or recorder.probed or not recorder.active(module):
            return
        if number_of_backward() >= 0:
            return
        if carried is not None and carried.carries_some_of(block.names):
            return  # what is carried cannot be left to a replay, and had room before
        visit = Visit(block, current, args, kwargs)
        earlier = self._ran.get(id(block))
        if earlier is not None and earlier.forward_pass.generation is current.generation:
            earlier.possible = visit.possible = False  # used twice
        self._open[id(module)] = self._ran[id(block)] = visit

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        visit = self._open.pop(id(module), None)
        if visit is None or number_of_backward() >= 0:
            return
        found = _grown(output)
        visit.possible &= len(found) == 1
        if visit.possible:
            found[0].register_hook(functools.partial(self._arrived, visit))
        else:
            visit.let_go()

    def _arrived(self, visit: Visit, grad: Tensor) -> None:
        """The backward pass enters a block: that of the one before it is over."""
        if not self._recorder.in_backward:  # a backward pass that is not ours
            return
        self.over()
        self.current = visit
        self._ran.pop(id(visit.block), None)
        visit.gradient = grad.detach()
        visit.versions = [*visit.versions, grad._version]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_ran": None, "current": None, "chosen": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ran=weakref.WeakValueDictionary())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, outermost first found."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    _collect(model, names, found)
    if names and not found:
        _collect(model, set(), found)
    return found


def _collect(module: nn.Module, names: set[str], found: list[nn.Module]) -> None:
    for child in module.children():
        in_list = not names and isinstance(module, nn.ModuleList)
        block = in_list or layer_kind(child).__name__ in names
        if block and next(child.parameters(), None) is not None:
            found.append(child)
        else:
            _collect(child, names, found)


def replayable(model: nn.Module, layers: Sequence[Layer]) -> Iterator[Block]:
    """The blocks of a model that can run again by themselves.

    Not those that are compiled (Python would compute a little else), that share parameters with
    other parts, or that are sharded together with them.
    """
    sharded = any(is_fsdp(m) for m in model.modules())
    for module in blocks_of(model):
        parts = set(module.modules())
        own = [layer for layer in layers if layer.module in parts]
        compiled = any(m._compiled_call_impl is not None for m in parts)
        inner = any(is_fsdp(m) for m in parts if m is not module)
        simple = all(not x.shared and x.rule.norm_is_local for x in own)
        if own and simple and not (compiled or inner) and is_fsdp(module) is sharded:
            yield Block(module, own)


def _put(known: dict[Hashable, int], shapes: Hashable, number: int) -> None:
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[shapes] = number


def _grown(output: Any) -> list[Tensor]:
    """The results that get a gradient, one of which may be for a tensor that all samples share."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    return [t for t in leaves if t.requires_grad or isinstance(t, Shared)]


def _random_state() -> tuple[Tensor, Tensor | None]:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), gpu


def _autocast(leaves: Sequence[Any]) -> Any:
    kind = next((t.device.type for t in leaves if isinstance(t, Tensor)), "cpu")
    enabled = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)
    return functools.partial(torch.autocast, kind, dtype=dtype, enabled=enabled)
