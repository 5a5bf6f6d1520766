"""Per-sample gradients that autograd carries to one node of each unit: of FSDP2, or the model.

Note [Carriers]
    A layer whose per-sample gradients are stored in any case need not send a record. Its tap gets
    one more input for each parameter: a *carrier* ``[B, *shape]`` without memory of its own, all
    of which come out of one node for the unit. What the tap's backward gives as a carrier's
    gradient are the per-sample gradients, formed by the layer's rule. Autograd adds those of
    several uses and hands them to the node together. So no record is made or looked at for each
    layer, and in a compiled graph carriers are inputs like any others: there is no Python a layer.

    Which layers are carried was learnt from a step with records, of inputs with the same shapes:
    those whose rows are the units, that run once, and whose gradients the planner stored. What a
    layer does otherwise later (several inputs, other rows) is tapped as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.core.norms.kept import Kept
from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import outside_graphs
from opacus.core.ranks.lone_units import UseOfUnits
from opacus.core.record.hooks import LayerHooks
from opacus.core.record.passes import ForwardPass
from opacus.core.record.record import ANCHOR
from opacus.core.record.recorder import Recorder
from opacus.core.record.whole import WholeSink
from opacus.core.sums.choice import Choice
from opacus.core.sums.limits import Limits

# Shapes of inputs that are remembered.
MOST_KNOWN = 64


class _Carrying(NamedTuple):
    """What one unit carries for inputs of some shapes.

    Attributes:
        hooks: Of its layers that are carried.
        owners: Their parameters, in the order of the layers.
        likes: ``[B, *shape]`` of each, without memory.
        choices: What the planner had decided.
    """

    hooks: list[LayerHooks]
    owners: tuple[str, ...]
    likes: list[Tensor]
    choices: dict[str, Choice]


Known = dict[nn.Module, _Carrying]


class Carried:
    """Lets units carry their gradients; see Note [Carriers].

    Guarantee: the gradients handed on are those that records of the same layers would give: row u
    is unit u's, and every use of a parameter is in it or has a record of its own.

    Args:
        units: Modules, and the names in the model of the parameters that each carries.
        recorder: Of the model.
        sink: Called in the backward pass with a forward pass and its gradients ``[B, *shape]`` by
            parameter name.
        limits: What may be held.
    """

    def __init__(
        self,
        units: Mapping[nn.Module, AbstractSet[str]],
        recorder: Recorder,
        sink: WholeSink,
        limits: Limits,
    ) -> None:
        self._sink, self._limits = sink, limits
        self._known: dict[Hashable, Known] = {}
        self._open: tuple[Hashable, ForwardPass] | None = None  # a pass to learn from
        self._now: Known = {}
        self._use: UseOfUnits | None = None
        self._entered: list[tuple[nn.Module, _Carrying]] = []
        self._units: dict[nn.Module, list[LayerHooks]] = {}
        self.choices: dict[str, Choice] = {}  # of the layers that the latest pass has carried
        enter, leave = outside_graphs(self._enter), outside_graphs(self._leave)
        for unit, names in units.items():
            own = [h for h in recorder.layer_hooks if names >= set(h.layer.owners.values())]
            gathered = is_fsdp(unit)
            if own:
                self._units[unit] = own
            if own and gathered:
                recorder.handles += [  # after FSDP2's own, which gathers
                    unit.register_forward_pre_hook(enter),
                    unit.register_forward_hook(leave, always_call=True),
                ]

    # --- which layers ---

    def begin(self, forward_pass: ForwardPass, inputs: Any, *, rows_are_units: bool) -> None:
        """The model's forward begins; it is recorded.

        Args:
            forward_pass: It.
            inputs: Arguments of the model.
            rows_are_units: Whether that is known of all layers.
        """
        self.end()
        batch, limits = forward_pass.batch, self._limits
        self._open, self.choices = None, {}
        plain = batch is not None and batch > 1 and forward_pass.named is None
        if not plain or limits.limited or limits.again:
            return
        shapes = [t.shape for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        key = (batch, *shapes)
        known = self._known.get(key)
        if known is None:
            self._open = key, forward_pass
        elif known and rows_are_units:
            self._now, self._use = known, UseOfUnits(forward_pass, self._sink)
            for unit in known:
                if not is_fsdp(unit):
                    self._enter(unit)

    def end(self) -> None:
        """The forward pass has ended or failed: all is in its place again."""
        while self._entered:
            self._out()
        self._now, self._use = {}, None

    def learn(
        self, passes: Collection[ForwardPass], kept: Kept, choices: Mapping[str, Choice]
    ) -> None:
        """A step with records has been measured.

        Args:
            passes: Whose records.
            kept: What is kept of them.
            choices: Why.
        """
        if self._open is None:
            return
        (key, seen), self._open = self._open, None
        if set(passes) != {seen} or kept.rounded:
            return
        if any(choice.what in ("replay", "offload") for choice in choices.values()):
            return  # memory is short: each record is looked at
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        found: Known = {}
        for unit, layers in self._units.items():
            own = [h for h in layers if _is_stored(h, seen, kept, choices)]
            if own:
                found[unit] = _carrying(own, kept, choices)
        self._known[key] = found

    def forget(self) -> None:
        """Memory has run out, or is counted: layers have records again."""
        self._known.clear()

    def carries_some_of(self, layers: AbstractSet[str]) -> bool:
        """Whether any of these layers has no record in the pass that runs now."""
        return any(not layers.isdisjoint(found.choices) for found in self._now.values())

    # --- around each unit ---

    def _enter(self, unit: nn.Module, args: Any = ()) -> None:
        """The unit's parameters have been gathered."""
        carrying = self._now.get(unit)
        if carrying is None or self._use is None or not torch.is_grad_enabled():
            return
        uses = self._use.forward_pass.generation.uses
        rest: Iterable[Tensor] = iter(
            _Carriers.apply(ANCHOR, self._use, carrying.owners, carrying.likes)
        )
        for hooks in carrying.hooks:
            spec = hooks.layer.spec
            hooks.carriers = tuple([next(rest) for _ in spec.params])  # type: ignore[call-overload]
            uses[spec.name] = uses.get(spec.name, 0) + 1
        self._use.forward_pass.generation.waiting.add(self._use)
        self.choices.update(carrying.choices)
        self._entered.append((unit, carrying))

    def _leave(self, unit: nn.Module, args: Any, output: Any) -> None:
        """The unit has run, or failed."""
        if self._entered and self._entered[-1][0] is unit:
            self._out()

    def _out(self) -> None:
        _, carrying = self._entered.pop()
        for hooks in carrying.hooks:
            hooks.carriers = ()

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "_known": {},
            "_open": None,
            "_now": {},
            "_use": None,
            "_entered": [],
        }
        return {**self.__dict__, **empty, "_units": {}, "choices": {}}


def _is_stored(
    hooks: LayerHooks, seen: ForwardPass, kept: Kept, choices: Mapping[str, Choice]
) -> bool:
    """Whether a layer ran once, on the units' rows, and its gradients were stored."""
    layer, choice = hooks.layer, choices.get(hooks.layer.spec.name)
    name, uses = layer.spec.name, seen.generation
    known = uses.uses.get(name) == 1 and name not in seen.moved | uses.recomputed
    stored = name in kept.layers and choice is not None and choice.what == "store"
    formed = [kept.formed.get(owner) for owner in layer.owners.values()]
    rows = all(grad is not None and len(grad) == seen.batch for grad in formed)
    ours = layer.rule.carries and not (layer.shared or layer.unheld or layer.reader)
    in_order = layer.spec.params in (("weight", "bias"), ("weight",), ("bias",))
    return ours and in_order and known and stored and rows and hooks.counts_rows_first()


def _carrying(hooks: list[LayerHooks], kept: Kept, choices: Mapping[str, Choice]) -> _Carrying:
    owners = tuple([h.layer.owners[name] for h in hooks for name in h.layer.spec.params])
    likes = [_without_memory(kept.formed[owner]) for owner in owners]
    names = [h.layer.spec.name for h in hooks]
    return _Carrying(hooks, owners, likes, {n: choices[n] for n in names})


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device whose elements are one."""
    return tensor.new_zeros(()).expand(tensor.shape)


class _Carriers(torch.autograd.Function):
    """The node of a unit; see Note [Carriers]."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: UseOfUnits, owners: tuple[str, ...], likes: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.carried, ctx.owners = use, owners
        ctx.set_materialize_grads(False)
        return tuple([like.detach() for like in likes])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pairs = zip(ctx.owners, grads, strict=True)  # what took no part has none
        ctx.carried.deliver({owner: grad for owner, grad in pairs if grad is not None})
        return None, None, None, None
