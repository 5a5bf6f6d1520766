"""Watches a model run: every use of a layer becomes one record per backward pass.

Note [How a layer is tapped]
    A forward hook sends the layer's output through :class:`~opacus.core.record.tap.Tap`, an
    identity whose backward receives the gradient with respect to that output. The layer's
    inputs are kept as the tap's *saved tensors*, so that activation checkpointing
    and offloading treat them like any other saved tensor, an in-place change of
    them raises, and nothing outlives the graph. The tap's result aliases the
    output without being a view of it for autograd: in-place operations that follow
    are differentiated as usual and do not disturb what the tap sees.

Note [No parameter gradients]
    Layers run on detached aliases of their trainable parameters. Autograd then never
    forms (nor, under FSDP or DDP, communicates) a weight gradient, in whichever way
    backward is started. Whatever gradient a trainable parameter still receives from
    autograd came past the taps.

Note [Forward passes and generations]
    The rows of one forward call belong together. If a second forward starts while the
    first still waits for its backward, both are of one generation: their records
    describe the same batch rows (weight sharing across calls). Outputs that never get a
    backward do not wait once that of others has begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import (
    number_of_backward,
    prepare_for_graphs,
    renumber,
    under_functorch,
)
from opacus.core.record.compiled import ADVICE, compiled_taps_from_environment
from opacus.core.record.empty import with_a_row, without_the_row
from opacus.core.record.head_loss import head_use_of
from opacus.core.record.hooks import LayerHooks
from opacus.core.record.layers import Layer
from opacus.core.record.named import NamedUnits
from opacus.core.record.provenance import IndexCheck, RepeatCheck, batch_of, possible_batches
from opacus.core.record.record import ForwardPass, Generation, Record
from opacus.core.record.regroup import record_by_unit
from opacus.core.record.tap import (
    ANCHOR,
    Tap,
    Use,
    differentiable,
    prepared,
    rows_of,
    tap_one,
    to_front,
)
from opacus.core.record.trail import Follower
from opacus.core.record.whole import LoneSample, WholeUse, only_whole
from opacus.core.record.whose import WhoseRows
from opacus.core.rules.generic import Call
from opacus.core.rules.spec import LayerSpec

logger = logging.getLogger(__name__)


class Recorder:
    """Attaches taps to layers and hands a :class:`Record` to ``sink`` for each use.

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
        self.layers = layers
        self.sink = sink
        self.batch_first = batch_first
        self.enabled = True
        self.in_backward = False
        self.probed = False  # whether the model runs on the side, to check it
        # Runs the model without taps where its batch is one sample, if that is possible.
        self.lone: LoneSample | None = None
        self.bare = False  # whether layers run without taps now
        # Whether compiled graphs contain taps, or end at each layer.
        self.taps_in_graphs = compiled_taps_from_environment()
        self.whose = WhoseRows(layer.spec for layer in layers)
        self._current: ForwardPass | None = None
        self._warned_of_joining = False
        self._generation = Generation()
        self.latest_batch: int | None = None
        self.named: NamedUnits | None = None  # units of the latest batch, if the user names them
        # Number of losses of the backward pass that runs, where it is known.
        self.losses: int | None = None
        own = getattr(root, "batch_first", None)  # a layer by itself, which knows better
        self._input_dim = 0 if (own if isinstance(own, bool) else batch_first) else 1
        self._latest_sizes: frozenset[int] = frozenset()
        self._sharded = any(is_fsdp(module) for module in root.modules())
        self._hooks = [LayerHooks(self, layer) for layer in layers]
        self.handles: list[Any] = []
        for layer, hooks in zip(layers, self._hooks, strict=True):
            # Before hooks that compute from parameters (weight_norm), after FSDP2's, which puts
            # them there.
            first = not is_fsdp(layer.module)
            before = layer.module.register_forward_pre_hook(hooks.before, prepend=first)
            after = layer.module.register_forward_hook(
                hooks.after, with_kwargs=True, prepend=True, always_call=True
            )
            self.handles += [renumber(before), renumber(after)]
        self.handles += [  # the root may be a layer: its forward pass begins before it runs
            root.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True),
            root.register_forward_hook(self._end_forward, always_call=True),
        ]
        prepare_for_graphs(PLAIN)

    @property
    def layer_handles(self) -> list[tuple[Any, Any]]:
        """The handles of each layer's hooks, before and after it runs."""
        own = self.handles[: 2 * len(self.layers)]
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
    def uses(self) -> list[str]:
        """Names of the layers that ran over the latest batch rows, in the order of first use."""
        return list(self._generation.uses)

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

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The model is about to run; returns the arguments that it gets, ``None`` for its own."""
        if self.in_backward:
            return None
        if not torch.compiler.is_compiling():
            prepare_for_graphs(PLAIN)  # should torch.compile have been imported meanwhile
        # Of a forward pass that was interrupted:
        self.end_lone()
        for hooks in self._hooks:
            hooks.put_back()
        if not self.enabled:
            return None
        if self._generation.begun or not self._generation.waiting:
            self._generation = Generation()
        batch = batch_of((args, kwargs), self._input_dim)
        self._latest_sizes = possible_batches((args, kwargs), self._input_dim)
        self._current = ForwardPass(self._generation, batch, self._latest_sizes)
        self._generation.calls.add(self._current)
        self.latest_batch = batch
        if self.named is not None and batch != 0:
            self._current.named, self._latest_sizes = self.named, frozenset()
            self._current.sizes = self._latest_sizes
        if batch == 0 and self.active(module):
            self._current.made_up = True
            return with_a_row(args, kwargs, self._input_dim)
        told = batch if batch is not None and self._latest_sizes <= {batch, 1} else None
        recorded = self.active(module)
        self.whose.begin(module, (args, kwargs), told, self._input_dim, recorded=recorded)
        lone = self.lone if self.named is None else None
        if lone is not None and lone.takes(batch) and self.active(module) and not under_functorch():
            self.bare = lone.begin(self._current)
        return None

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The model has run, or failed; returns its output without a row that was made up."""
        made_up = self._current is not None and self._current.made_up
        self._current = None
        if not self.in_backward:
            self.end_lone()
        self.whose.end(output)
        return without_the_row(output, self._input_dim) if made_up else None

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

    def samples_are_told(self) -> None:
        """The number of samples comes from the user: what waits need not have the inputs'."""
        self._latest_sizes = frozenset()
        for use in self._generation.waiting:
            use.forward_pass.sizes = frozenset()

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
        if not picked:
            raise RuntimeError(
                f"{spec} returned {type(output).__name__}, in which no tensor was found, so its "
                "parameters could not be trained: let it return tensors, or a tuple, list or dict "
                "of them, or freeze it"
            )
        inputs, in_tree = tree_flatten((args, kwargs))
        tensors = [i for i in inputs if isinstance(i, Tensor)]
        for tensor in tensors:
            if type(tensor) is Tensor and not tensor.is_floating_point():
                self._look_up(spec, tensor)
        dim = self.batch_dim(layer, outputs[picked[0]].dim())
        use = Use(self, layer, spec, self.forward_pass(), dim, inputs, in_tree)
        picked_outputs = self._placed(use, [outputs[i] for i in picked], tensors)
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
        dim, loss = self.batch_dim(layer, output.dim()), head_use_of(output)
        own = layer if loss is None else loss.layer(layer, spec, dim)
        use = Use(self, own, spec, self.forward_pass(), dim)
        if self.whose.asks(use, output):
            (output,) = self._placed(use, [output], [x])
        self._register(use, output.shape)
        return tap_one(ANCHOR, use, output, x) if loss is None else loss.tap(use, output)

    def _register(self, use: Use, output_shape: torch.Size) -> None:
        recomputed = self.in_backward
        if recomputed and self.lone is not None and use.spec.name not in self._generation.uses:
            self.lone.rule_out("reentrant checkpoints hide the forward pass")
        if recomputed:
            self._generation.recomputed.add(use.spec.name)
        use.register(output_shape, counted=not recomputed)

    def _look_up(self, spec: LayerSpec, indices: Tensor) -> None:
        """Check a table's indices, where it runs first: reentrant checkpoints record later."""
        if not self.in_backward or spec.name not in self._generation.uses:
            self.whose.indices.look_up(spec, indices)

    def check_rows(self, layer: Layer, inputs: Any, tapped: Any) -> None:
        """Refuse a layer whose rows are found not to be samples."""
        first = tree_leaves(tapped)[0]
        if self.batch_dim(layer, first.dim()) == 0:
            self.whose.indices.ran(layer.spec, inputs, first)

    def note_rows(self, layer: Layer, output: Any) -> None:
        """A layer ran without a tap; in the forward pass of a lone sample its rows count."""
        hidden = self.enabled and layer.module.training and not (self.in_backward or self.bare)
        if hidden and not torch.is_grad_enabled():
            dims = next((t.dim() for t in tree_leaves(output) if differentiable(t)), 0)
            self.whose.note_hidden(layer, output, self.batch_dim(layer, dims))
        if self._current is None or not self.bare or not layer.trainable_now().params:
            return
        first = next((t for t in tree_leaves(output) if differentiable(t)), None)
        if first is not None and first.dim():
            dim = self.batch_dim(layer, first.dim())
            self._current.saw(layer.spec.name, rows_of(first.shape, dim))

    def begin_compiled(self, layer: Layer, output: Tensor, names: tuple[str, ...]) -> Use:
        """A layer, with these trainable parameters, has run in a compiled graph.

        Raises:
            RuntimeError: In a checkpoint's recomputation, where the samples are not known.
            ValueError: The output is one row for all samples.
        """
        spec = layer.part(names)
        if self.in_backward or number_of_backward() >= 0:
            raise RuntimeError(
                f"{spec} is computed again by an activation checkpoint, in a compiled graph: its "
                f"samples cannot be told then. Compile parts without checkpoints, or set {ADVICE}"
            )
        forward_pass = self.forward_pass()
        batch, dims = forward_pass.batch, output.dim()
        dim = self.batch_dim(layer, dims)
        rows_first = dims > 1 and dim == 0
        if rows_first and output.shape[0] == 1 and batch not in (None, 0, 1):
            raise ValueError(
                f"{spec} runs once for all {batch} samples, in a compiled graph: give it a row "
                f"for each sample (expand its input), freeze it, or set {ADVICE}"
            )
        use = Use(self, layer, spec, forward_pass, dim)
        if forward_pass.named is not None:
            use.units = forward_pass.named.of_layer(spec, None, output, dim)
        use.register(output.shape, counted=True)
        return use

    def forward_pass(self) -> ForwardPass:
        """The call of the model that runs; outside of it, one of its own."""
        if self._current is not None:
            return self._current
        if not self._generation.waiting and not self.in_backward:
            self._generation = Generation()
        recomputed = self.in_backward or number_of_backward() >= 0  # by a reentrant checkpoint
        sizes = self._latest_sizes if recomputed else frozenset()
        return ForwardPass(self._generation, sizes=sizes, named=self.named)

    def _placed(self, use: Use, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        if use.forward_pass.made_up:
            return outputs
        recomputed = self.in_backward or number_of_backward() >= 0
        return self.whose.place(use, outputs, inputs, recomputed=recomputed)

    # --- backward ---

    def deliver(
        self,
        use: Use,
        tensors: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        *,
        borrowed: bool = False,
    ) -> None:
        """Build the record of one use and hand it to the sink.

        Raises:
            RuntimeError: The gradient is to be differentiated again, in which parameters take
                part past the taps.
            ValueError: The layer's rows are of no sample, and get a gradient.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a gradient through {use.spec} is taken with create_graph=True, of the private "
                "model in train mode. What a second backward pass (of a gradient penalty, say) "
                "asks of the parameters cannot be clipped here. Use grad_sample_mode='no_op' and "
                "form per-sample gradients by torch.func (vmap of grad), or call disable_hooks() "
                "or eval() before the forward pass if parameters do not learn from it"
            )
        if use.refusal is not None:
            raise ValueError(f"{use.refusal}. Nothing of this batch was added to the model")
        generation = use.forward_pass.generation
        generation.waiting.discard(use)
        generation.begun = True
        if len(generation.calls) > 1:
            self._join(use.forward_pass)
        # FSDP2 takes the weight away again, which such a rule is given.
        borrowed = borrowed or (self._sharded and use.layer.rule.as_given)
        self.sink(self._record(use, tensors, grads, borrowed))

    def _join(self, forward_pass: ForwardPass) -> None:
        if forward_pass.generation.join(forward_pass) < 2 or self._warned_of_joining:
            return
        self._warned_of_joining = True
        logger.warning(
            "Losses of several forward passes are summed before one backward pass: row i of each "
            "batch is taken to be the same sample (two views of it, say) and clipped as one. If "
            "they are different samples, call the model once on all of them, or backward() and "
            "step() for each batch."
        )

    def _record(
        self, use: Use, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], borrowed: bool
    ) -> Record:
        forward_pass, layer, name = use.forward_pass, use.layer, use.spec.name
        # One input may hold several samples, in a list, say: then the losses tell.
        one = forward_pass.batch == 1 and forward_pass.named is None
        told = one and self.losses not in (None, 1)
        if use.units is not None and not told:
            with self.paused():  # some rules run the layer again
                return record_by_unit(use, use.units, tensors, grads, borrowed=borrowed)
        dim = use.batch_dim
        backprops = [to_front(g.detach(), dim) for g in grads]
        inputs = [to_front(t.detach(), dim) for t in tensors]
        if forward_pass.made_up:  # all rows are nobody's
            backprops, inputs = (
                [g[:0] for g in backprops],
                [t[:0] if t.dim() else t for t in inputs],
            )
        first = backprops[0]
        batch, dtype = first.shape[0], first.dtype
        # All rows of another use are the one sample's, too (DoRA runs an adapter on an identity).
        seen = 0 if one and not told else forward_pass.rows.get(name, 0)
        if self.whose.repeats.open:
            self.whose.repeats.received(use.spec, first, use.repeated)
        if layer.rule.needs_parameters:
            arguments = use.rebuild(inputs)
            activations: Any = Call.of(layer.module, *arguments, dim, use.spec.params, use.buffers)
        elif layer.rule.as_given:
            activations = tuple(inputs)
        else:
            activations = tuple([prepared(t, dtype, batch) for t in inputs])
        return Record(
            layer=layer,
            spec=use.spec,
            activations=activations,
            backprops=first if len(backprops) == 1 else tuple(backprops),
            rows=0 if forward_pass.made_up else max(seen, batch),
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


# Of no use in a compiled graph.
PLAIN = (
    *(Recorder, LayerHooks, Follower, LoneSample, WholeUse, Use, Tap, Layer),
    *(WhoseRows, IndexCheck, RepeatCheck),
)
