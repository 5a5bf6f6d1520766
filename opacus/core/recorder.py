"""Watches a model run: every use of a layer becomes one record per backward pass.

Note [How a layer is tapped]
    A forward hook sends the layer's output through :class:`~opacus.core.tap.Tap`, an identity
    whose backward receives the gradient with respect to that output. The layer's
    inputs are kept as the tap's *saved tensors*, so that activation checkpointing
    and offloading treat them like any other saved tensor, an in-place change of
    them raises, and nothing outlives the graph. The tap's result aliases the
    output without being a view of it for autograd: in-place operations that follow
    are differentiated as usual and do not disturb what the tap sees.

Note [No parameter gradients]
    With ``detach=True`` the layer runs on detached aliases of its trainable
    parameters. Autograd then never forms (nor, under FSDP or DDP, communicates)
    a weight gradient, in whichever way backward is started. Whatever gradient a
    trainable parameter still receives from autograd came past the taps.

Note [Forward passes and generations]
    The rows of one forward call belong together. If a second forward starts while the
    first still waits for its backward, both are of one generation: their records
    describe the same batch rows (weight sharing across calls). Outputs that never get a
    backward do not wait once that of others has begun.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from opacus.core.compiled_tap import compiled_taps_from_environment
from opacus.core.layer_hooks import LayerHooks
from opacus.core.lone_sample import LoneSample, WholeUse, only_whole
from opacus.core.provenance import IndexCheck, RepeatCheck, batch_of
from opacus.core.rules import LayerRule
from opacus.core.rules.generic import Call
from opacus.core.spec import LayerSpec
from opacus.core.tap import ANCHOR, Tap, Use, differentiable, prepared, tap_one, to_front
from opacus.core.torch_internals import (
    number_of_backward,
    prepare_for_graphs,
    renumber,
    under_functorch,
)


@dataclass(eq=False)
class Layer:
    """A module whose directly owned parameters get per-sample gradients.

    Attributes:
        owners: Local parameter name -> name of the parameter in the model; the
            same for all layers that share a parameter.
        shared: Whether another layer has one of these parameters too.
        batch_first: Whether this layer has the batch in dimension 0 (else in 1); ``None``
            if it goes by what the model says.
        features: Number of last dimensions of the output that are not samples or time
            steps; ``None`` if unknown.
    """

    module: nn.Module
    spec: LayerSpec
    rule: LayerRule
    owners: Mapping[str, str]
    shared: bool = False
    batch_first: bool | None = None
    features: int | None = None
    _parts: dict[tuple[str, ...], LayerSpec] = field(default_factory=dict)

    def part(self, params: tuple[str, ...]) -> LayerSpec:
        """The spec restricted to some of its parameters."""
        if params not in self._parts:
            self._parts[params] = replace(self.spec, params=params)
        return self._parts[params]

    def trainable_now(self) -> LayerSpec:
        """The spec restricted to the parameters that still require gradients."""
        parameters, spec = self.module._parameters, self.spec
        for name in spec.params:
            parameter = parameters.get(name)
            if parameter is None or not parameter.requires_grad:
                names = tuple(n for n in spec.params if _requires_grad(parameters.get(n)))
                return self.part(names)
        return spec


@dataclass(eq=False)
class Generation:
    """Forward passes over the same batch rows, with the taps that still wait."""

    uses: dict[str, int] = field(default_factory=dict)
    begun: bool = False
    waiting: weakref.WeakSet[Use | WholeUse] = field(default_factory=weakref.WeakSet)

    def __reduce__(self) -> tuple[type[Generation], tuple[()]]:
        return Generation, ()  # copies and pickles of a model start afresh


@dataclass(eq=False)
class ForwardPass:
    """One call of the model: its generation and the batch rows seen so far."""

    generation: Generation
    batch: int | None = None
    rows: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Record:
    """What the backward pass revealed about one use of a layer.

    Attributes:
        activations: Batch-first inputs of the layer (a ``Call`` for the generic rule).
        backprops: Gradient with respect to its output, batch first.
        rows: Largest number of rows the layer saw in this forward pass.
        reused: Whether the layer was used more than once in this generation.
        forward_pass: The call of the model that it belongs to.
    """

    layer: Layer
    spec: LayerSpec
    activations: Any
    backprops: Any
    rows: int
    reused: bool
    generation: Generation
    forward_pass: ForwardPass | None = None
    versions: list[int] | None = None  # of the tensors, since it was kept
    borrowed: bool = False  # a compiled graph may write over the tensors once they are delivered

    @property
    def elements(self) -> int:
        """Number of elements of activations and backprops."""
        return sum(t.numel() for t in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among activations and backprops."""
        activations, backprops = self.activations, self.backprops
        if type(activations) is tuple and isinstance(backprops, Tensor):
            return [*activations, backprops]
        leaves, _ = tree_flatten((activations, backprops))
        return [t for t in leaves if isinstance(t, Tensor)]

    def hold(self) -> None:
        """The record is used after its delivery: copy what is borrowed."""
        if self.borrowed:
            held = (self.activations, self.backprops)
            self.activations, self.backprops = tree_map_only(Tensor, torch.clone, held)
            self.borrowed = False

    def owned(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """``grads`` made from this record, none of which lies in memory that is borrowed."""
        if not self.borrowed:
            return grads
        places = {t.untyped_storage().data_ptr() for t in self.tensors}
        borrowed = {n for n, g in grads.items() if g.untyped_storage().data_ptr() in places}
        return {n: g.clone() if n in borrowed else g for n, g in grads.items()}

    @property
    def batch(self) -> int:
        """Number of samples in this record."""
        first = self.backprops if isinstance(self.backprops, Tensor) else self.backprops[0]
        return first.shape[0]  # type: ignore[no-any-return]


class Recorder:
    """Attaches taps to layers and hands a :class:`Record` to ``sink`` for each use.

    Args:
        root: The model; its forward delimits forward passes.
        layers: The layers to tap.
        sink: Called in the backward pass, without gradient tracking.
        batch_first: Whether dimension 0 (rather than 1) of activations is the batch.
        detach: See Note [No parameter gradients].
    """

    def __init__(
        self,
        root: nn.Module,
        layers: list[Layer],
        sink: Callable[[Record], None],
        *,
        batch_first: bool = True,
        detach: bool = False,
    ) -> None:
        self.layers = layers
        self.sink = sink
        self.batch_first = batch_first
        self.detach = detach
        self.enabled = True
        self.in_backward = False
        self.probed = False  # whether the model runs on the side, to check it
        # Runs the model without taps where its batch is one sample, if that is possible.
        self.lone: LoneSample | None = None
        self.bare = False  # whether layers run without taps now
        # Whether compiled graphs contain taps, or end at each layer.
        self.taps_in_graphs = compiled_taps_from_environment()
        self.indices = IndexCheck(layer.spec for layer in layers)
        self.repeats = RepeatCheck()
        self._current: ForwardPass | None = None
        self._generation = Generation()
        self.latest_batch: int | None = None
        self.handles = [
            root.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True),
            root.register_forward_hook(self._end_forward, always_call=True),
        ]
        self._hooks = [LayerHooks(self, layer) for layer in layers]
        for layer, hooks in zip(layers, self._hooks, strict=True):
            before = layer.module.register_forward_pre_hook(hooks.before)
            after = layer.module.register_forward_hook(
                hooks.after, with_kwargs=True, prepend=True, always_call=True
            )
            self.handles += [renumber(before), renumber(after)]
        prepare_for_graphs(PLAIN)

    @property
    def layer_handles(self) -> list[tuple[Any, Any]]:
        """The handles of each layer's hooks, before and after it runs."""
        own = self.handles[2 : 2 + 2 * len(self.layers)]
        return list(zip(own[::2], own[1::2], strict=True))

    def remove(self) -> None:
        """Take every hook off; the modules are as they were before."""
        self.end_lone()
        for hooks in self._hooks:
            hooks.put_back()
        while self.handles:
            self.handles.pop().remove()
        self.forget()

    @property
    def uses(self) -> Mapping[str, int]:
        """How often each layer ran over the latest batch rows, in the order of its first use."""
        return self._generation.uses

    def forget(self) -> None:
        """Drop what is known of earlier forward passes; later ones start afresh."""
        self._current = None
        self._generation = Generation()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run modules without recording, as rules that re-run a layer do."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def probing(self, sink: Callable[[Record], None]) -> Iterator[None]:
        """Hand records to ``sink``; what is known of other passes is the same afterwards."""
        before = dict(self.__dict__)
        fresh = {"indices": copy.deepcopy(self.indices), "repeats": RepeatCheck()}
        self.__dict__.update(fresh, sink=sink, detach=True, lone=None, bare=False, probed=True)
        self.__dict__.update(taps_in_graphs=False, _current=None, _generation=Generation())
        try:
            yield
        finally:
            for hooks in self._hooks:
                hooks.put_back()
            self.indices.end()
            self.__dict__.update(before)

    @contextmanager
    def passing_back(self) -> Iterator[None]:
        """A backward pass of ours: layers that run in it are computed again."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_current=None, _generation=Generation(), in_backward=False, bare=False)
        return state

    # --- forward ---

    def active(self, module: nn.Module) -> bool:
        """Whether the layer is tapped if it runs now."""
        if self.bare or not (self.enabled and module.training and torch.is_grad_enabled()):
            return False
        return self.lone is None or not self._recomputes_lone_sample()

    def _recomputes_lone_sample(self) -> bool:
        """Whether a checkpoint runs layers again, in a backward pass that is not ours."""
        elsewhere = self._current is None and not self.in_backward
        return elsewhere and number_of_backward() >= 0 and self.only_lone_samples_wait()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.in_backward:
            return
        if not torch.compiler.is_compiling():
            prepare_for_graphs(PLAIN)  # should torch.compile have been imported meanwhile
        # Of a forward pass that was interrupted:
        self.end_lone()
        for hooks in self._hooks:
            hooks.put_back()
        if not self.enabled:
            return
        if self._generation.begun or not self._generation.waiting:
            self._generation = Generation()
        batch = batch_of((args, kwargs), 0 if self.batch_first else 1)
        self._current = ForwardPass(self._generation, batch)
        self.latest_batch = batch
        if self.batch_first:
            self.indices.begin((args, kwargs), batch, self.active(module), module)
        lone = self.lone
        if lone is not None and lone.takes(batch) and self.active(module) and not under_functorch():
            self.bare = lone.begin(self._current)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._current = None
        self.indices.end()
        if not self.in_backward:
            self.end_lone()

    def end_lone(self) -> None:
        """The model's forward has ended, even by an interruption: all is in its place again."""
        if self.in_backward:
            return
        if self.lone is not None:
            self.lone.end()
        self.bare = False

    def only_lone_samples_wait(self) -> bool:
        """Whether all forward passes that wait for their backward run without taps."""
        alive = self.lone is not None and bool(self.lone.alive)
        return alive and only_whole(self._generation.waiting)

    def waiting_batches(self) -> list[int]:
        """Samples of each forward pass of this generation that waits for its backward."""
        passes = {use.forward_pass for use in self._generation.waiting}
        return [one.batch for one in passes if one.batch is not None]

    def ran_bare(self, losses: Tensor) -> bool:
        """Whether the layers ran without taps for these losses, so that checkpoints do, too."""
        return self.lone is not None and self.lone.ran_for(losses, self)

    def tap(
        self, layer: Layer, args: Any, kwargs: Any, output: Any, spec: LayerSpec | None = None
    ) -> Any:
        """Send ``output`` through a tap; returns what the layer's caller gets.

        ``spec`` is that of the parameters that are trainable now, where it is known.
        """
        spec = layer.trainable_now() if spec is None else spec
        if not spec.params:
            return output
        if len(args) == 1 and not kwargs and type(args[0]) is type(output) is Tensor:
            return self._tap_one(layer, spec, args[0], output)
        outputs, out_tree = tree_flatten(output)
        picked = [i for i, o in enumerate(outputs) if differentiable(o)]
        if not picked and self.detach:
            raise RuntimeError(
                f"{spec} returned {type(output).__name__}, in which no tensor was found, so its "
                "parameters could not be trained: let it return tensors, or a tuple, list or dict "
                "of them, or freeze it"
            )
        if not picked:
            return output
        inputs, in_tree = tree_flatten((args, kwargs))
        tensors = [i for i in inputs if isinstance(i, Tensor)]
        for tensor in tensors:
            if type(tensor) is Tensor and not tensor.is_floating_point():
                self._look_up(spec, tensor)
        use = Use(self, layer, spec, self.forward_pass(), inputs, in_tree)
        picked_outputs = [self._spread(use, outputs[i], tensors) for i in picked]
        self._register(use, picked_outputs[0].shape)
        tapped = Tap.apply(ANCHOR, use, len(picked), *picked_outputs, *tensors)
        for index, tensor in zip(picked, tapped, strict=True):
            outputs[index] = tensor
        return tree_unflatten(outputs, out_tree)

    def _tap_one(self, layer: Layer, spec: LayerSpec, x: Tensor, output: Tensor) -> Any:
        """:meth:`tap` for what most layers do: one tensor in, one out."""
        if not output.is_floating_point() and not output.is_complex():
            return output
        if not x.is_floating_point():
            self._look_up(spec, x)
        use = Use(self, layer, spec, self.forward_pass(), None, None)
        if output.shape[0:1] == (1,):
            output = self._spread(use, output, [x])
        self._register(use, output.shape)
        return tap_one(ANCHOR, use, output, x)

    def _register(self, use: Use, output_shape: torch.Size) -> None:
        recomputed = self.in_backward
        if recomputed and self.lone is not None and use.spec.name not in self._generation.uses:
            self.lone.rule_out("reentrant checkpoints hide the forward pass")
        use.register(output_shape, counted=not recomputed)

    def _look_up(self, spec: LayerSpec, indices: Tensor) -> None:
        """Check a table's indices, where it runs first: reentrant checkpoints record later."""
        if not self.in_backward or spec.name not in self._generation.uses:
            self.indices.look_up(spec, indices)

    def check_rows(self, layer: Layer, inputs: Any, tapped: Any) -> None:
        """Refuse a layer whose rows are found not to be samples."""
        first = tree_leaves(tapped)[0]
        if self.batch_dim(layer, first.dim()) == 0:
            self.indices.ran(layer.spec, inputs, first)

    def forward_pass(self) -> ForwardPass:
        """The call of the model that runs; outside of it, one of its own."""
        if self._current is not None:
            return self._current
        if not self._generation.waiting and not self.in_backward:
            self._generation = Generation()
        return ForwardPass(self._generation)

    def _spread(self, use: Use, output: Tensor, inputs: list[Tensor]) -> Tensor:
        """Give each sample its own copy of an output computed once for all of them.

        A table indexed by positions of shape ``[1, T]`` is added to every sample by
        broadcasting, which would sum the samples' gradients before the tap.
        """
        batch = use.forward_pass.batch
        if batch is None or batch == 1 or output.dim() < 2 or output.shape[0] != 1:
            return output
        time_major = self.batch_dim(use.layer, output.dim()) == 1
        if time_major or any(t.dim() and t.shape[0] != 1 for t in inputs):
            return output
        use.repeated = True
        self.repeats.repeated(use.spec)
        return output.expand(batch, *output.shape[1:])

    # --- backward ---

    def deliver(
        self,
        use: Use,
        tensors: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        *,
        borrowed: bool = False,
    ) -> None:
        """Build the record of one use and hand it to the sink."""
        generation = use.forward_pass.generation
        generation.waiting.discard(use)
        generation.begun = True
        if not torch.is_grad_enabled():
            self.sink(self._record(use, tensors, grads, borrowed))
            return
        with torch.no_grad():  # create_graph=True
            self.sink(self._record(use, tensors, grads, borrowed))

    def _record(
        self, use: Use, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], borrowed: bool
    ) -> Record:
        forward_pass, layer, name = use.forward_pass, use.layer, use.spec.name
        dim = self.batch_dim(layer, grads[0].dim())
        backprops = [to_front(g.detach(), dim) for g in grads]
        inputs = [to_front(t.detach(), dim) for t in tensors]
        first = backprops[0]
        batch, dtype = first.shape[0], first.dtype
        if self.repeats.open:
            self.repeats.received(use.spec, first, use.repeated)
        if layer.rule.needs_parameters:
            activations: Any = _call(layer.module, *use.rebuild(inputs), dim)
        else:
            activations = tuple([prepared(t, dtype, batch) for t in inputs])
        return Record(
            layer=layer,
            spec=use.spec,
            activations=activations,
            backprops=first if len(backprops) == 1 else tuple(backprops),
            rows=max(forward_pass.rows.get(name, 0), batch),
            reused=forward_pass.generation.uses.get(name, 0) > 1,
            generation=forward_pass.generation,
            forward_pass=forward_pass,
            borrowed=borrowed,
        )

    def batch_dim(self, layer: Layer, output_dims: int) -> int:
        """Dimension of a layer's inputs and outputs that counts samples.

        In a time-major model a layer may see ``[B, H]`` too: its head, say.
        """
        own = layer.batch_first
        if own is not None:
            return 0 if own else 1
        lone = layer.features is not None and output_dims - layer.features < 2
        return 0 if self.batch_first or lone else 1


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int) -> Call:
    parameters = {n: p.detach() for n, p in module._parameters.items() if p is not None}
    buffers = {n: b for n, b in module._buffers.items() if b is not None}
    return Call(args, kwargs, parameters, buffers, batch_dim)


def _requires_grad(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


# Of no use in a compiled graph.
PLAIN = (Recorder, LayerHooks, IndexCheck, RepeatCheck, LoneSample, WholeUse, Use, Tap, Layer)
