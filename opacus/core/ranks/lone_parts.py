"""Batches of one sample under FSDP2, whose parameters come and go with their parts of the model.

As in :mod:`opacus.core.record.lone`, the parameters of a model that runs on a single sample are
replaced by aliases, and what autograd forms for these is the sample's gradient. Here each part,
which FSDP2 gathers at once, has a node of its own: its parameters are there just before it runs.
FSDP2 sees no gradient, as its parameters are not in the graph, and reduces nothing: the sum is
reduced once it is clipped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from opacus.core.platform.torch_internals import (
    TakenOff,
    at_end_of_backward,
    gathered_by,
    number_of_backward,
    outside_graphs,
    put_back,
    take_off,
)
from opacus.core.record.layers import is_alias
from opacus.core.record.lone import (
    LoneSample,
    Name,
    PassSink,
    PassUse,
    Place,
    names_of,
    put_aliases,
    put_originals,
    trainable,
)
from opacus.core.record.passes import ForwardPass
from opacus.core.record.recorder import Recorder
from opacus.core.sums.limits import Limits


class LoneSampleOfParts(LoneSample):
    """:class:`LoneSample` for a model that is sharded by FSDP2.

    Args:
        model: The sharded model.
        recorder: Its recorder.
        sink: See :class:`LoneSample`.
        limits: What may be held: under a limit blocks may have to run again.
    """

    again_in_graphs: ClassVar[bool] = True  # their parts enter again, too

    def __init__(
        self, model: nn.Module, recorder: Recorder, sink: PassSink, limits: Limits
    ) -> None:
        super().__init__(recorder.layers, sink, recorder.layer_handles)
        self._limits = limits
        self._recorder = weakref.ref(recorder)
        self._use: PassUse | None = None
        self._entered: list[tuple[nn.Module, list[Place], TakenOff]] = []
        self._parts: weakref.WeakKeyDictionary[nn.Module, list[Name]] = weakref.WeakKeyDictionary()
        # Known once the first of them runs: what is off duty does not change any more.
        self._off_parts: weakref.WeakKeyDictionary[nn.Module, list[Any]] = (
            weakref.WeakKeyDictionary()
        )
        enter, leave = outside_graphs(self._enter), outside_graphs(self._leave)
        for part, names in gathered_by(model).items():
            self._parts[part] = [name for name in names_of(recorder.layers) if name[2] in names]
            recorder.handles += [  # after FSDP2's own, which gathers
                part.register_forward_pre_hook(enter),
                part.register_forward_hook(leave, always_call=True),
            ]

    @property
    def ready(self) -> bool:
        """See :attr:`LoneSample.ready`."""
        return super().ready and not self._limits.limited

    def begin(self, forward_pass: ForwardPass) -> bool:
        """The model's forward begins: parts put aliases in the places of their parameters."""
        self.end()
        self.running = True
        self._use = self._waiting(UseOfParts(forward_pass, self._sink))
        return True

    def end(self) -> None:
        """See :meth:`LoneSample.end`."""
        while self._entered:
            self._out()
        self._use = None
        super().end()

    def _enter(self, part: nn.Module, args: Any) -> None:
        """The part's parameters have been gathered."""
        use = self._use or self._run_again()
        if use is None:
            return
        found = [one for one in trainable(self._parts[part]) if not is_alias(one.parameter)]
        places = put_aliases(found, use)
        # Off where it runs again, too: a compiled part must be the same to the compiler.
        off = take_off(self._off_in(part))
        self._entered.append((part, places, off))

    def _off_in(self, part: nn.Module) -> list[Any]:
        """The hooks of the part's layers that are taken off."""
        if part not in self._off_parts:
            here = {id(layer) for layer, _, _ in self._parts[part]}
            self._off_parts[part] = [h for layer, h in self._off_duty if id(layer) in here]
        return self._off_parts[part]

    def _run_again(self) -> PassUse | None:
        """The pass whose part a checkpoint runs again: it meets aliases, as in the forward pass.

        Else a compiled part would run another graph there, which saves other tensors.
        """
        if not self.alive or number_of_backward() < 0:
            return None
        recorder = self._recorder()
        ours = recorder is not None and self.all_lone(recorder.passes.generation.waiting)
        return next(iter(self.alive)) if ours else None

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        """The part has run, or failed; FSDP2 may have taken its parameters away again."""
        if self._entered and self._entered[-1][0] is part:
            self._out()

    def _out(self) -> None:
        _, places, off = self._entered.pop()
        put_back(off)
        put_originals(places)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_use": None, "_entered": [], "_parts": {}}
        state["_off_parts"] = {}
        return {**state, "_recorder": None, "ruled_out": "the model is a copy"}


class UseOfParts(PassUse):
    """One forward pass: the gradients of its parts are handed on together."""

    __slots__ = ("_grads",)

    def __init__(self, forward_pass: ForwardPass, sink: PassSink) -> None:
        super().__init__(forward_pass, sink)
        self._grads: dict[int, dict[str, Tensor]] = {}  # by the number of the backward pass

    def deliver(self, grads: Mapping[str, Tensor]) -> None:
        """One part's gradients, by parameter name."""
        number = number_of_backward()  # a pass that failed has left a part of them
        if number not in self._grads:
            at_end_of_backward(functools.partial(self._all, number))
        own = self._grads.setdefault(number, {})
        for name, grad in grads.items():
            known = own.get(name)
            own[name] = grad if known is None else known + grad

    def _all(self, number: int) -> None:
        super().deliver(self._grads.pop(number))
