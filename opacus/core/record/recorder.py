"""Watches a model run: every use of a layer becomes one record per backward pass.

Note [No parameter gradients]
    Layers run on detached aliases of their trainable parameters. Autograd then never
    forms (nor, under FSDP or DDP, communicates) a weight gradient, in whichever way
    backward is started. Any gradient that a trainable parameter still receives from autograd
    bypassed the taps.

How a layer is tapped is in :mod:`opacus.core.record.taps`, which forward pass it belongs to in
:mod:`opacus.core.record.passes`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.attention import AttentionPlans
from opacus.core.platform.memory import give_back_to_the_card
from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import (
    number_of_backward,
    outside_graphs,
    prepare_for_graphs,
    renumber,
    under_functorch,
)
from opacus.core.record.changes import Changes
from opacus.core.record.course import Course
from opacus.core.record.empty import with_a_row, without_the_row
from opacus.core.record.experts import watch_experts
from opacus.core.record.flags import Flags
from opacus.core.record.hooks import LayerHooks
from opacus.core.record.layers import Layer
from opacus.core.record.lone import LoneSample, PassUse
from opacus.core.record.own_checkpoints import OwnCheckpoints
from opacus.core.record.passes import Passes
from opacus.core.record.provenance import IndexCheck, RepeatCheck
from opacus.core.record.reached import Reached
from opacus.core.record.record import Record, Tap, Use
from opacus.core.record.row_trail import SampleRows
from opacus.core.record.taps import Taps
from opacus.core.record.trail import Follower
from opacus.core.record.whose import WhoseRows


class Recorder(Taps):
    """The hooks on a model and its layers; see :class:`~opacus.core.record.taps.Taps`.

    Args:
        root: The model; its forward delimits forward passes.
        layers: The layers to tap.
        sink: Called in the backward pass, without gradient tracking.
        batch_first: Whether dimension 0 (rather than 1) of activations is the batch.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: list[Layer],
        sink: Callable[[Record], None],
        *,
        batch_first: bool = True,
    ) -> None:
        own = getattr(root, "batch_first", None)  # a layer by itself, which knows better
        super().__init__(
            layers,
            sink,
            batch_first=batch_first,
            dim=0 if (own if isinstance(own, bool) else batch_first) else 1,
            sharded=any(is_fsdp(module) for module in root.modules()),
        )
        self.ran_out = False  # whether the latest pass ended as there was no memory
        self._modules = [layer.module for layer in layers]  # layers hold theirs weakly
        self._hooks = [LayerHooks(self, layer) for layer in layers]
        self.handles: list[Any] = []
        for layer, hooks in zip(layers, self._hooks, strict=True):
            if layer.reader is not None:
                reader = layer.reader()
                before = reader.register_forward_pre_hook(hooks.before_reader)
                self.handles += [before, reader.register_forward_hook(
                    hooks.after_reader, prepend=True, always_call=True
                )]  # fmt: skip
                continue
            # Before hooks that compute from parameters (weight_norm), after FSDP2's, which puts
            # them there.
            first = not is_fsdp(layer.module)
            before = layer.module.register_forward_pre_hook(hooks.before, prepend=first)
            after = layer.module.register_forward_hook(
                hooks.after, with_kwargs=True, prepend=True, always_call=True
            )
            self.handles += [renumber(before), renumber(after)]
        self.handles += watch_experts(root.modules(), self)
        self.handles += [  # the root may be a layer: its forward pass begins before it runs
            root.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True),
            root.register_forward_hook(self._end_forward, always_call=True),
        ]
        self._own_checkpoints = OwnCheckpoints(root.modules())
        self.handles.append(self._own_checkpoints)
        prepare_for_graphs(PLAIN)

    @property
    def layer_handles(self) -> list[tuple[Any, Any]]:
        """The handles of each layer's hooks, before and after it runs."""
        own = self.handles[: 2 * len(self.layers)]
        return list(zip(own[::2], own[1::2], strict=True))

    @property
    def layer_hooks(self) -> list[LayerHooks]:
        """The hooks of each layer."""
        return self._hooks

    def remove(self) -> None:
        """Take every hook off; the modules are as they were before."""
        self.end_lone()
        self.put_back()
        while self.handles:
            self.handles.pop().remove()
        self.passes.forget()
        self.attention.give_back()

    def put_back(self) -> None:
        """The parameters are in their places again, after a forward pass that was interrupted."""
        for hooks in self._hooks:
            hooks.put_back()

    @contextmanager
    def backward(self, losses: int | None = None, *, lone: bool = False) -> Iterator[None]:
        """A backward pass of ours: layers that run in it are computed again.

        Args:
            losses: How many there are, if that is known.
            lone: Whether layers have run without taps for them.
        """
        before = self.in_backward, self.ours, self.lone_runs, self.losses
        self.in_backward, self.ours, self.lone_runs, self.losses = True, True, lone, losses
        try:
            yield
        except torch.OutOfMemoryError:
            self.ran_out = True
            raise
        finally:
            self.in_backward, self.ours, self.lone_runs, self.losses = before

    def ran_lone(self, losses: Tensor) -> bool:
        """Whether the layers ran without taps for these losses, so that checkpoints do, too."""
        lone = self.lone
        return lone is not None and bool(lone.alive) and lone.ran_for(losses, self)

    @outside_graphs
    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The model is about to run; returns the arguments that it gets, ``None`` for its own."""
        if self.in_backward:
            return None
        if self.ran_out:  # nothing of the failed pass is needed any more
            self.ran_out = False
            give_back_to_the_card()
        if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
            prepare_for_graphs(PLAIN)  # it may have been imported meanwhile
            if self._own_checkpoints.blocks:
                self._own_checkpoints.put_around()
        self.end_lone()
        self.put_back()
        if not self.enabled:
            return None
        passes, inputs, self.ours = self.passes, (args, kwargs), True
        current, recorded = passes.begin(inputs), self.active(module)
        if recorded and not self.probed:
            for tell in passes.given:
                tell(inputs)
        alone = len(current.generation.calls) == 1
        if torch.cuda.is_initialized() and alone and number_of_backward() < 0:
            self.attention.choose((*args, *kwargs.values()) if recorded else None)
        if passes.named is not None and recorded:
            self.reached.note(current)
        if current.batch == 0 and recorded:
            current.made_up = True
            return with_a_row(args, kwargs, passes.dim)
        self.whose.begin(module, inputs, current, passes.told, passes.dim, recorded=recorded)
        lone = self.lone if current.batch == 1 and passes.named is None else None
        if lone is not None and lone.ready and recorded and not under_functorch():
            self.lone_runs = lone.begin(current)
        elif self.carried is not None and recorded and not (self.probed or under_functorch()):
            told = passes.told is not None and not self.whose.indices.follows
            self.carried.begin(current, inputs, rows_are_units=told and not self.whose.asked)
        self.whose.course.begin(module if recorded else None)
        return None

    @outside_graphs
    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The model has run, or failed; returns its output without a row that was made up."""
        if output is not None:
            self.whose.ran(None if self.carried is None else self.carried.manner)
        ended, self.ours = self.passes.end(), self.in_backward
        if ended is not None and self.whose.moved_hidden:
            self.reached.note(ended)
        if self.reached.noted:
            self.reached.end(output)
        self.end_lone()
        if output is None:
            self.ran_out = isinstance(sys.exc_info()[1], torch.OutOfMemoryError)
            if number_of_backward() < 0:
                self.attention.give_back()
            self.whose.repeats.explain(sys.exc_info()[1])
        self.whose.end(output, ended, module)
        made_up = ended is not None and ended.made_up
        return without_the_row(output, self.passes.dim) if made_up else None

    def end_lone(self) -> None:
        """The model's forward has ended, even by an interruption: all is in its place again."""
        if self.in_backward:
            return
        if self.lone is not None and self.lone.running:
            self.lone.end()
        if self.carried is not None and self.carried.running:
            self.carried.end()
        self.lone_runs = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "in_backward": False, "ours": False, "lone_runs": False}


# Of no use in a compiled graph.
PLAIN = (
    *(Recorder, Taps, Passes, LayerHooks, Follower, LoneSample, PassUse, Use, Tap, Layer),
    *(
        WhoseRows,
        IndexCheck,
        RepeatCheck,
        Reached,
        SampleRows,
        Flags,
        Course,
        Changes,
        AttentionPlans,
    ),
)
