"""Identifies the forward pass of layers that a checkpoint recomputes in the backward pass.

Note [Compiled blocks in checkpoints]
    A checkpoint drops what a compiled graph saves, the number of each layer's use too, and runs the
    graph again in the backward pass. Which forward pass it is part of then comes from the
    model's outputs: hooks on them are called before anything behind them is computed again. All
    else that a use has is found as it was in the forward pass. The hooks also keep the forward pass
    among those that wait for their backward, as long as its graph lives. Calls whose rows the user
    names units of have them, too, and calls with moved rows in reentrant checkpoints.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from opacus.core.platform.torch_internals import number_of_backward
from opacus.core.platform.trees import tensors_of
from opacus.core.record.named import NamedUnits
from opacus.core.record.passes import ForwardPass, Passes
from opacus.core.record.trail import same_uses
from opacus.core.rules.spec import LayerSpec


class CompiledPass:
    """A forward pass with layers in compiled graphs, until its graph is gone."""

    __slots__ = ("__weakref__", "forward_pass")

    def __init__(self, forward_pass: ForwardPass) -> None:
        self.forward_pass = forward_pass


class Reached:
    """Notes forward passes with compiled layers, and finds them again in the backward pass.

    Attributes:
        noted: Whether a forward pass was noted or found since the latest one ended.
    """

    def __init__(self) -> None:
        self.noted = False
        self._running: CompiledPass | None = None
        self._backward = -1
        self._passes: list[ForwardPass] = []

    def note(self, forward_pass: ForwardPass) -> None:
        """A layer runs in a compiled graph, or on named units, in this call of the model."""
        self.noted = True
        if self._running is None or self._running.forward_pass is not forward_pass:
            self._running = CompiledPass(forward_pass)
            forward_pass.generation.waiting.add(self._running)

    def end(self, output: Any) -> None:
        """The call has ended, with this output; ``None`` if it failed."""
        running, self._running = self._running, None
        if number_of_backward() < 0:
            self.noted, self._passes = False, []
        if running is None:
            return
        for leaf in tensors_of(output):
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(self._reach, running))

    def _reach(self, compiled: CompiledPass, grad: Tensor) -> None:
        own, number = compiled.forward_pass, number_of_backward()
        own.generation.waiting.discard(compiled)
        own.reach()
        if number != self._backward:
            self.noted, self._backward, self._passes = True, number, []
        if own not in self._passes:
            self._passes.append(own)

    @property
    def passes(self) -> list[ForwardPass]:
        """The forward passes whose outputs the running backward pass has gone through."""
        return self._passes if number_of_backward() == self._backward else []

    def check_rows(self, passes: Passes) -> None:
        """A reentrant checkpoint runs layers again, in the order of the backward passes.

        Raises:
            ValueError: They may be of another call than the latest one, by which the units of their
                rows would be told, and in which they are others.
        """
        latest = passes.latest
        for own in {*self._passes, *passes.generation.calls}:
            hidden = {} if latest is None else latest.hidden
            moved = own is not latest and not same_uses(own.hidden, hidden)
            if moved or _other_names(own.named, passes.named):
                raise ValueError(
                    "a reentrant checkpoint runs layers again, of an earlier call of the model "
                    "than the latest one, on rows of other units: whose those are is not known. "
                    "Use checkpoint(..., use_reentrant=False), or backward() after each call"
                )

    def now(self, spec: LayerSpec) -> ForwardPass:
        """The forward pass that the running backward pass computes a layer of again.

        Raises:
            RuntimeError: It is not known.
        """
        passes = self.passes
        if len(passes) == 1 and spec.name in passes[0].generation.uses:
            return passes[0]
        several = "several forward passes are in one backward pass"
        raise RuntimeError(
            f"{spec} is computed again by an activation checkpoint, in a compiled graph, and of "
            f"which call of the model is not known ({several if len(passes) > 1 else _WHY}): use "
            "checkpoint(..., use_reentrant=False) and a loss of the model's outputs, with one "
            "backward pass for each call"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"noted": False, "_running": None, "_backward": -1, "_passes": []}


def _other_names(own: NamedUnits | None, named: NamedUnits | None) -> bool:
    if named is None or own is named:
        return False
    return named.count > 0 if own is None else not named.same(own)  # an empty batch has none


_WHY = "the checkpoint is reentrant, or the loss is of something else than the model's outputs"
