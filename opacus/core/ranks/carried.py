"""What autograd carries from layers to one node of their part of the model.

A part is what FSDP2 gathers at once; without FSDP2 the whole model is one.

Note [Carriers]
    A layer whose per-sample gradients are stored in any case need not send a record. Its tap gets
    one more input for each parameter: a *carrier* ``[B, *shape]`` without memory of its own, all
    of which come out of one node for the part. What the tap's backward gives as a carrier's
    gradient are the per-sample gradients, formed by the layer's rule. Autograd adds those of
    several uses and hands them to the node together.

    In a compiled graph carriers are inputs like any others: there is no Python a layer, and the
    compiler forms small gradients in the kernels that have their operands at hand. A layer there
    whose record is kept has two carriers, like its input and its output, whose gradients are the
    input and the gradient of the output themselves; the node makes the record. The compiler leaves
    the memory of what it gives to carriers alone, so that nothing is copied. Those of two uses must
    not be added: a second use is tapped as ever.

    In eager code the carrier of a plain layer with a small weight is the weight itself, see Note
    [A weight for each sample] in :mod:`opacus.core.record.own_weights`. Other plain layers are
    one node each, see Note [A node for a linear layer] in :mod:`opacus.core.record.own_calls`.

    Which layers these are was learnt from a step with records, of inputs with the same shapes and
    at least as many samples (more may need more memory than was there): those whose rows are the
    units and that run once. What a layer does otherwise later (several inputs, other rows) is
    tapped as ever. Where all of them are stored, which takes the same memory whatever the inputs'
    length, the step may have had up to twice as long ones: texts differ in length each time.

    One process uses this, too. It is among the ranks' files as parts are FSDP2's: their parameters
    are there just before they run.

    A checkpoint around a compiled part runs its graph again, which has carriers as inputs: the part
    then gets some that nothing comes back through. Autograd uses only what that graph saves.
    Other layers that a checkpoint runs again have records.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.norms.kept import Kept
from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import (
    calls_themselves,
    number_of_backward,
    outside_graphs,
)
from opacus.core.platform.trees import leaves_of
from opacus.core.ranks.carried_layers import Carrying, carried_layer, targets_of
from opacus.core.ranks.carrier_nodes import PartNode, Unused, with_rows
from opacus.core.ranks.lone_parts import UseOfParts
from opacus.core.record.carriers import Carriers
from opacus.core.record.hooks import LayerHooks
from opacus.core.record.lone import PassSink
from opacus.core.record.own_calls import call_directly, calls_may_change
from opacus.core.record.own_weights import Owned, cast_on, own_weights
from opacus.core.record.passes import ForwardPass
from opacus.core.record.record import ANCHOR
from opacus.core.record.recorder import Recorder
from opacus.core.record.trail import constant
from opacus.core.rules.spec import LayerSpec
from opacus.core.sums.choice import Choice
from opacus.core.sums.limits import Limits

# Shapes of inputs that are remembered.
MOST_KNOWN = 64
_SAMPLES = "samples"


Known = dict[nn.Module, Carrying]
# The forms of a model's arguments.
Inputs = tuple[Hashable, ...]


class Carried:
    """Lets parts of the model carry their gradients; see Note [Carriers].

    Guarantee: the gradients handed on are those that records of the same layers would give, and
    the records those of a tap: row u is unit u's, and every use of a parameter is in it or has a
    record of its own.

    Args:
        parts: Modules, and the names in the model of the parameters that each carries.
        recorder: Of the model.
        sink: Called in the backward pass with a forward pass and its gradients ``[B, *shape]`` by
            parameter name.
        limits: What may be held.
    """

    def __init__(
        self,
        parts: Mapping[nn.Module, AbstractSet[str]],
        recorder: Recorder,
        sink: PassSink,
        limits: Limits,
    ) -> None:
        self._sink, self._limits = sink, limits
        self._known: dict[Inputs, tuple[int, Known]] = {}  # with the samples learnt from
        self.learning: tuple[Inputs, ForwardPass] | None = None  # a pass to learn from
        self._again: set[nn.Module] = set()  # compiled parts that a checkpoint has run again in it
        self._passes: weakref.WeakKeyDictionary[ForwardPass, Known] = weakref.WeakKeyDictionary()
        self._now: Known = {}
        self.running = False  # in a forward pass with carriers
        self._use: UseOfParts | None = None
        self._direct = 0  # layers that have been called without hooks in it
        # With what is called without hooks now.
        self._entered: list[tuple[nn.Module, Carrying, list[nn.Module]]] = []
        self._parts: dict[nn.Module, list[LayerHooks]] = {}
        self.choices: dict[str, Choice] = {}  # of the layers that the latest pass has carried
        enter, leave = outside_graphs(self._enter), outside_graphs(self._leave)
        for part, names in parts.items():
            own = [h for h in recorder.layer_hooks if names >= set(h.layer.owners.values())]
            gathered = is_fsdp(part)
            if own:
                self._parts[part] = own
            if own and gathered:
                recorder.handles += [  # after FSDP2's own, which gathers
                    part.register_forward_pre_hook(enter),
                    part.register_forward_hook(leave, always_call=True),
                ]

    # --- which layers ---

    def begin(self, forward_pass: ForwardPass, inputs: Any, *, rows_are_units: bool) -> None:
        """The model's forward begins; it is recorded.

        Args:
            forward_pass: It.
            inputs: Arguments of the model.
            rows_are_units: Whether that is known of all layers.
        """
        batch, limits = forward_pass.batch, self._limits
        self.learning, self.choices, self._again = None, {}, set()
        plain = batch is not None and batch > 1 and forward_pass.named is None
        if not plain or limits.limited or limits.again:
            return
        key = tuple([_form(leaf, batch) for leaf in leaves_of(inputs)])
        most, known = self._known.get(key) or self._learnt_of_longer(key)
        if batch is not None and batch > most:
            self.learning = key, forward_pass
        elif known and rows_are_units:
            self._now, self._use = known, UseOfParts(forward_pass, self._sink)
            self._passes[forward_pass] = known
            self.running = True
            for part in known:
                if not is_fsdp(part):
                    self._enter(part)

    def _learnt_of_longer(self, key: Inputs) -> tuple[int, Known]:
        """What was learnt from inputs that were up to twice as long as these; else nothing."""
        for other, learnt in self._known.items():
            if not _is_longer(other, key):
                continue
            layers = [layer for own in learnt[1].values() for layer in own.layers]
            if all(layer.choice is not None for layer in layers):
                return learnt
        return 0, {}

    @property
    def manner(self) -> Hashable:
        """Which layers are carried in the pass that runs, and how many were without hooks."""
        return self._direct, *[own.names for own in self._now.values()]

    def end(self) -> None:
        """The forward pass has ended or failed: all is in its place again."""
        while self._entered:
            self._out()
        self._now, self._use, self.running, self._direct = {}, None, False, 0

    def learn(
        self, passes: Collection[ForwardPass], kept: Kept, choices: Mapping[str, Choice]
    ) -> None:
        """A step with records has been measured.

        Args:
            passes: Whose records.
            kept: What is kept of them.
            choices: Why.
        """
        if self.learning is None:
            return
        (key, seen), self.learning = self.learning, None
        if set(passes) != {seen} or kept.rounded:
            return
        if any(choice.what in ("replay", "offload") for choice in choices.values()):
            return  # memory is short: each record is looked at
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        found: Known = {}
        for part, layers in self._parts.items():
            again = frozenset() if part in self._again else seen.generation.recomputed
            maybe = [
                carried_layer(h, seen, kept, choices)
                for h in layers
                if h.layer.spec.name not in again
            ]
            own = [layer for layer in maybe if layer is not None]
            if own:
                names = frozenset(layer.name for layer in own)
                found[part] = Carrying(
                    own,
                    names,
                    {c.layer: c for layer in own if (c := layer.choice) is not None},
                    own[0].likes[0].device,
                    [layer.call for layer in own if layer.call is not None],
                )
        self._known[key] = seen.batch or 0, found

    def forget(self) -> None:
        """Memory has run out, or is counted: layers have records again."""
        self._known.clear()

    def carries_some_of(self, layers: AbstractSet[str]) -> bool:
        """Whether any of these layers has no record in the pass that runs now."""
        return any(not layers.isdisjoint(found.names) for found in self._now.values())

    def check_again(self, spec: LayerSpec, forward_pass: ForwardPass) -> None:
        """A checkpoint runs a layer of a compiled graph again, which is about to get a record.

        Raises:
            RuntimeError: It had carriers in this forward pass, so that its graph was another one.
        """
        again = [part for part, _, _ in self._entered]
        carried = self._passes.get(forward_pass, {}).items()
        if any(spec.name in own.names for part, own in carried if part not in again):
            self.forget()
            raise RuntimeError(
                f"{spec} is computed again by an activation checkpoint, which was not there in "
                "earlier steps and whose compiled graph was made without it: switch activation "
                "checkpointing on before the first step. Nothing of this batch was added to the "
                "model; the next step is made for the checkpoint"
            )

    # --- around each part ---

    def _enter(self, part: nn.Module, args: Any = ()) -> None:
        """The part's parameters have been gathered."""
        carrying = self._now.get(part)
        if carrying is None or self._use is None or not torch.is_grad_enabled():
            self._run_again(part)
            return
        one, first = self._use.forward_pass, carrying.layers[0].hooks.layer.spec
        cast, direct = cast_on(carrying.device), calls_may_change()
        with torch.no_grad():
            targets, likes = targets_of(carrying, one, cast, direct)
        carriers = iter(PartNode.apply(ANCHOR, self._use, targets, likes, first) or ())
        owned: Owned = []
        for layer, target in zip(carrying.layers, targets, strict=True):
            if isinstance(target, str) and layer.owns is not None:
                owned.append((layer.owns, next(carriers)))
            else:
                own = tuple([next(carriers) for _ in layer.likes])
                layer.hooks.carriers = Carriers(layer.form, own, layer.dims)
        own_weights(owned, cast)
        called = call_directly(carrying.calls) if direct and cast is None else []
        called += [module for module, _ in owned]
        self._direct += len(called)
        self.choices.update(carrying.choices)
        one.generation.waiting.add(self._use)
        carrying.layers[0].hooks.recorder.reached.note(one)
        self._entered.append((part, carrying, called))

    def _run_again(self, part: nn.Module) -> None:
        """If a checkpoint does so with a compiled part, its graph finds carriers, as before."""
        compiled = part._compiled_call_impl is not None and torch.is_grad_enabled()
        if not compiled or number_of_backward() < 0 or part not in self._parts:
            return
        if self.learning is not None:
            self._again.add(part)
        hooks = self._parts[part][0]
        carried = [
            one for one in hooks.recorder.reached.passes if part in self._passes.get(one, ())
        ]
        if not carried:
            return
        carrying = self._passes[carried[0]][part]
        one = hooks.recorder.reached.now(carrying.layers[0].hooks.layer.spec)
        one.generation.recomputed |= carrying.names
        for layer in carrying.layers:
            likes = [with_rows(like, one.batch) for like in layer.likes]
            own = Unused.apply(ANCHOR, layer.hooks.layer.spec, likes)
            layer.hooks.carriers = Carriers(layer.form, own, layer.dims)  # type: ignore[arg-type]
        self._entered.append((part, carrying, []))

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        """The part has run, or failed."""
        if self._entered and self._entered[-1][0] is part:
            self._out()

    def _out(self) -> None:
        _, carrying, called = self._entered.pop()
        calls_themselves(called)
        for layer in carrying.layers:
            layer.hooks.carriers = None

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {
            "_known": {},
            "learning": None,
            "_again": set(),
            "_now": {},
            "running": False,
            "_use": None,
            "_entered": [],
        }
        state = {**self.__dict__, **empty, "_parts": {}, "choices": {}}
        del state["_passes"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._passes = weakref.WeakKeyDictionary()


def _form(leaf: Any, batch: int | None) -> Hashable:
    """What of an argument of the model decides what is carried, for any number of samples."""
    if not isinstance(leaf, Tensor):
        return constant(leaf)  # type: ignore[no-any-return]
    shape = tuple(leaf.shape)
    return (_SAMPLES, *shape[1:]) if shape[:1] == (batch,) else shape


def _is_longer(one: Inputs, other: Inputs) -> bool:
    """Whether arguments with a row for each sample are up to twice as large, and others alike."""
    return len(one) == len(other) and all(map(_covers, one, other))


def _covers(large: Any, small: Any) -> bool:
    if large == small:
        return True
    rows = isinstance(large, tuple) and isinstance(small, tuple) and len(large) == len(small)
    if not rows or not large[0] == small[0] == _SAMPLES:
        return False
    return all(n <= most <= 2 * n for most, n in zip(large[1:], small[1:], strict=True))
