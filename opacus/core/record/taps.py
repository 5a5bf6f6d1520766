"""What happens at each use of a layer: the tap on its output, and the record of its backward.

Note [How a layer is tapped]
    A forward hook sends the layer's output through :class:`~opacus.core.record.record.Tap`, an
    identity whose backward receives the gradient with respect to that output. The layer's
    inputs are kept as the tap's *saved tensors*, so that activation checkpointing
    and offloading treat them like any other saved tensor, an in-place change of
    them raises, and nothing outlives the graph. The tap's result aliases the
    output without being a view of it for autograd: in-place operations that follow
    are differentiated as usual and do not disturb what the tap sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus.core.platform.attention import AttentionPlans
from opacus.core.platform.saved_tensors import finds_saved_tensors
from opacus.core.platform.sharded import is_dtensor
from opacus.core.platform.torch_internals import at_end_of_backward, number_of_backward
from opacus.core.record.carriers import Carries, twice_differentiated
from opacus.core.record.compiled import compiled_taps_from_environment
from opacus.core.record.head_loss import HEAD_USE, HeadUse
from opacus.core.record.layers import Layer
from opacus.core.record.lone import LoneSample
from opacus.core.record.passes import ForwardPass, Passes
from opacus.core.record.reached import Reached
from opacus.core.record.record import ANCHOR, Record, Tap, Use, differentiable, record_of, tap_one
from opacus.core.record.regroup import record_by_unit
from opacus.core.record.shared import Scope, Shared, tap_shared
from opacus.core.record.unfinished import Unfinished
from opacus.core.record.whose import WhoseRows
from opacus.core.rules.spec import LayerSpec


class Taps:
    """Taps uses of layers, and hands a :class:`Record` to ``sink`` for each backward of one.

    Args:
        layers: The layers to tap.
        sink: Called in the backward pass, without gradient tracking.
        batch_first: Whether dimension 0 (rather than 1) of activations is the batch.
        dim: That of the model's inputs.
        sharded: Whether FSDP2 may take weights away while records are kept.

    Attributes:
        enabled: Whether layers are tapped at all.
        in_backward: Whether a backward pass of ours runs: layers in it are computed again.
        ours: Whether one runs, or the model's forward. One name for both, which is what a compiled
            graph reads: a checkpoint runs it again without another being made.
        lone_runs: Whether layers run without taps now, on a lone sample.
        lone: Runs the model so, if that is possible.
        carried: Lets autograd carry per-sample gradients past the records, if that is possible.
        losses: Number of losses of the backward pass that runs, where it is known.
        probed: Whether the model runs on the side, to check it.
        unfinished: Backward passes of torch's own that have failed.
        taps_in_graphs: Whether compiled graphs contain taps, or end at each layer.
        attention: Which attention forward passes may take.
    """

    def __init__(
        self,
        layers: list[Layer],
        sink: Callable[[Record], None],
        *,
        batch_first: bool,
        dim: int,
        sharded: bool,
    ) -> None:
        self.layers = layers
        self.sink = sink
        self.batch_first = batch_first
        self.enabled = True
        self.in_backward = self.ours = self.lone_runs = self.probed = False
        self.losses: int | None = None
        self.lone: LoneSample | None = None
        self.carried: Carries | None = None
        self.taps_in_graphs = compiled_taps_from_environment()
        self.whose = WhoseRows(layers)
        self.reached = Reached()
        self.attention = AttentionPlans()
        self.passes = Passes(dim)
        self.unfinished = Unfinished()
        self._sharded = sharded

    def send_to(self, sink: Callable[[Record], None]) -> None:
        """From now on records go there."""
        self.sink = sink

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run modules without recording, as rules that re-run a layer do."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    # --- forward ---

    def active(self, module: nn.Module) -> bool:
        """Whether the layer is tapped if it runs now."""
        if self.lone_runs or not (self.enabled and module.training and torch.is_grad_enabled()):
            return False
        if self.lone is None or self.ours:
            return True
        # A checkpoint runs layers of a lone sample again, in a backward pass that is not ours.
        waiting = self.passes.generation.waiting
        return number_of_backward() < 0 or not self.lone.all_lone(waiting)

    def tap(
        self, layer: Layer, args: Any, kwargs: Any, output: Any, spec: LayerSpec | None = None
    ) -> Any:
        """Send ``output`` through a tap; returns what the layer's caller gets.

        ``spec`` is that of the parameters that are trainable now, where it is known.
        """
        spec = layer.trainable_now() if spec is None else spec
        if not spec.params:
            return output
        if not (len(args) == 1 and not kwargs and type(args[0]) is type(output) is Tensor):
            return self._tap_many(layer, spec, args, kwargs, output)
        x: Tensor = args[0]  # what most layers do: one tensor in, one out
        if not output.is_floating_point() and not output.is_complex():
            return output
        if not x.is_floating_point():
            _look_up(self, spec, x)
        dim, loss = self.batch_dim(layer, output.dim()), getattr(output, HEAD_USE, None)
        own = layer if loss is None else loss.layer(layer, spec, dim)
        use = Use(self, own, spec, self.forward_pass(), dim)
        one = use.forward_pass
        known = one.batch != 1 and one.named is None and not self.whose.asked
        if not known or output.shape[:1] == (1,):
            if layer.rule.hides_rows:
                self.whose.same_rows(x, output)
            scope = self._sharing(use, [output], [x])
            if scope is not None:
                return tap_shared(use, output, [x], scope)
            (output,) = self._placed(use, [output], [x])
        if self.in_backward:
            self._computed_again(use)
        use.register(output.shape, counted=not self.in_backward)
        if isinstance(loss, HeadUse):
            return loss.tap(use, output)
        one.tokens[spec.name] = x.shape[1] if x.dim() == output.dim() == 3 else 0
        return tap_one(ANCHOR, use, output, x)

    def _tap_many(self, layer: Layer, spec: LayerSpec, args: Any, kwargs: Any, output: Any) -> Any:
        """:meth:`tap` of a layer with several inputs or outputs."""
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
                _look_up(self, spec, tensor)
        dim = self.batch_dim(layer, outputs[picked[0]].dim())
        use = Use(self, layer, spec, self.forward_pass(), dim, inputs, in_tree)
        scope = self._sharing(use, [outputs[i] for i in picked], tensors)
        if scope is not None:
            outputs[picked[0]] = tap_shared(use, outputs[picked[0]], tensors, scope)
            return tree_unflatten(outputs, out_tree)
        picked_outputs = self._placed(use, [outputs[i] for i in picked], tensors)
        if self.in_backward:
            self._computed_again(use)
        use.register(picked_outputs[0].shape, counted=not self.in_backward)
        tapped = Tap.apply(ANCHOR, use, len(picked), *picked_outputs, *tensors)
        for index, tensor in zip(picked, tapped, strict=True):
            outputs[index] = tensor
        return tree_unflatten(outputs, out_tree)

    def _sharing(self, use: Use, outputs: list[Tensor], inputs: list[Tensor]) -> Scope | None:
        """The forward pass, if all samples share what a layer gave."""
        own = next((t for t in outputs if isinstance(t, Shared)), None)
        if own is not None and len(outputs) == 1:
            return own.scope
        given = next((t for t in inputs if isinstance(t, Shared)), None)
        if given is not None:
            raise given.refusal(f"goes into {use.spec}, where it meets the samples' rows")
        if use.forward_pass.made_up:
            return None
        if self.in_backward or number_of_backward() >= 0:
            again = len(outputs) == 1 and finds_saved_tensors()
            return self.whose.shared_again(use.spec, outputs[0]) if again else None
        if any(is_dtensor(t) for t in outputs):
            return None  # of a layer that is split over ranks
        return self.whose.sharing(use, outputs)

    def _computed_again(self, use: Use) -> None:
        """A checkpoint runs a layer in a backward pass of ours."""
        name, generation = use.spec.name, self.passes.generation
        if self.lone is not None and name not in generation.uses:
            self.lone.rule_out("reentrant checkpoints hide the forward pass")
        generation.recomputed.add(name)

    def _placed(self, use: Use, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        if use.forward_pass.made_up:
            return outputs
        recomputed = self.in_backward or number_of_backward() >= 0
        return self.whose.place(use, outputs, inputs, recomputed=recomputed)

    def forward_pass(self) -> ForwardPass:
        """The call of the model that runs; outside of it, one of its own."""
        if self.passes.current is not None:
            return self.passes.current
        again = self.in_backward or number_of_backward() >= 0  # by a reentrant checkpoint
        if again:
            self.reached.check_rows(self.passes)
        return self.passes.outside(in_backward=self.in_backward, recomputed=again)

    def batch_dim(self, layer: Layer, output_dims: int) -> int:
        """Dimension of a layer's inputs and outputs that counts samples.

        In a time-major model a layer may see ``[B, H]`` too: its head, say.
        """
        own = layer.batch_first
        if own is not None:
            return 0 if own else 1
        flat = layer.features is not None and output_dims - layer.features < 2
        return 0 if self.batch_first or flat else 1

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
        begun = self.in_backward or use.forward_pass.generation.begun
        if not (begun or torch.compiler.is_compiling()):
            self.unfinished.running = True
            at_end_of_backward(partial(setattr, self.unfinished, "running", False))
        try:
            if torch.is_grad_enabled():
                raise twice_differentiated(use.spec)
            if use.refusal is not None:
                raise ValueError(f"{use.refusal}. Nothing of this batch was added to the model")
            if use.reached():
                self.passes.join(use.forward_pass)
            # FSDP2 takes the weight away again, which such a rule is given.
            borrowed = borrowed or (self._sharded and use.layer.rule.as_given)
            forward_pass = use.forward_pass
            # One input may hold several samples, in a list, say: then the losses tell.
            one = forward_pass.batch == 1 and forward_pass.named is None
            told = one and self.losses not in (None, 1)
            if use.units is not None and not told:
                with self.paused():  # some rules run the layer again
                    record = record_by_unit(use, use.units, tensors, grads, borrowed=borrowed)
            else:
                # All rows of another use are the one sample's, too (DoRA runs an adapter on an
                # identity).
                rows = 0 if one and not told else forward_pass.rows.get(use.spec.name, 0)
                record = record_of(use, tensors, grads, rows, borrowed=borrowed)
                if self.whose.repeats.open:
                    backprops = record.backprops
                    first = backprops[0] if isinstance(backprops, tuple) else backprops
                    self.whose.repeats.received(use.spec, first, use.repeated)
            if self.enabled:
                self.sink(record)
        except Exception as error:
            self.unfinished.why = f"{type(error).__name__}: {error}"
            raise


def _look_up(taps: Taps, spec: LayerSpec, indices: Tensor) -> None:
    """Check a table's indices, where it runs first: reentrant checkpoints record later."""
    if not taps.in_backward or spec.name not in taps.passes.generation.uses:
        taps.whose.indices.look_up(spec, indices)
