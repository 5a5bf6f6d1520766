"""Results of a model's run: uses of layers, and a record of each use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from opacus.core.platform.torch_internals import accumulator_of, direct_apply, will_run
from opacus.core.record.layers import Layer
from opacus.core.record.passes import ForwardPass, Generation
from opacus.core.rules.generic import Call
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units


class Sink(Protocol):
    """Takes what the backward pass brings to a tap."""

    def deliver(
        self,
        use: Use,
        tensors: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        *,
        borrowed: bool = False,
    ) -> None:
        """The inputs of a layer's use, and the gradients with respect to its outputs."""


class Use:
    """One use of a layer, from its forward until its graph is gone.

    Args:
        sink: Takes what the backward pass brings; held weakly, as the graph may outlive the model.
        batch_dim: Dimension of inputs and outputs that counts samples.
        inputs: The layer's inputs as leaves of ``in_tree``; both ``None`` for a layer
            that was called with one tensor.
    """

    __slots__ = (
        "__weakref__",
        "_in_tree",
        "_inputs",
        "_sink",
        "batch_dim",
        "before",
        "forward_pass",
        "layer",
        "refusal",
        "repeated",
        "spec",
        "units",
    )  # fmt: skip

    def __init__(
        self,
        sink: Sink,
        layer: Layer,
        spec: LayerSpec,
        forward_pass: ForwardPass,
        batch_dim: int,
        inputs: list[Any] | None = None,
        in_tree: TreeSpec | None = None,
    ) -> None:
        self._sink = weakref.ref(sink)
        self.batch_dim = batch_dim
        self.layer = layer
        self.spec = spec
        self.units: Units | None = None  # of its rows, if they are not the units themselves
        self.refusal: str | None = None  # what to say if its rows, nobody's, get a gradient
        self.repeated = False  # whether one output was repeated for all samples
        self.before = layer.buffers_before, layer.attributes_before  # it runs
        self.forward_pass = forward_pass
        # Tensors are the tap's to save; only their places are remembered here.
        self._inputs = [_PLACE if isinstance(i, Tensor) else i for i in inputs or ()]
        self._in_tree = in_tree

    @property
    def sink(self) -> Sink:
        """Where the backward pass brings what it has.

        Raises:
            RuntimeError: The private model is gone.
        """
        sink = self._sink()
        if sink is None:
            raise RuntimeError(f"{self.spec}: the private model was deleted before backward()")
        return sink

    def register(self, output_shape: torch.Size, *, counted: bool, dims: int | None = None) -> None:
        """Note that the layer ran; a recomputation is not counted as another use.

        Args:
            output_shape: Of what is tapped.
            counted: Whether this is another use.
            dims: Number of dimensions of what the layer gave, if the rows tapped are made of it.
        """
        if not counted or self.refusal is not None:
            return
        name, generation = self.spec.name, self.forward_pass.generation
        self.forward_pass.kinds.add((name, len(output_shape) if dims is None else dims))
        generation.uses[name] = generation.uses.get(name, 0) + 1
        generation.waiting.add(self)
        units, rows = self.units, rows_of(output_shape, self.batch_dim)
        if units is not None:
            self.forward_pass.moved.add(name)
            rows = units.count if units.count > 1 else rows  # its record will be grouped by them
        seen = self.forward_pass.rows
        seen[name] = max(seen.get(name, 0), rows)

    def reached(self) -> bool:
        """A backward pass has come here; whether the model was called several times for it."""
        generation, note = self.forward_pass.generation, self.forward_pass.note
        generation.waiting.discard(self)
        generation.begun = True
        if note is not None:
            note()
        return len(generation.calls) > 1

    def rebuild(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments, with ``tensors`` in the places of the original ones."""
        if self._in_tree is None:
            return (tensors[0],), {}
        fresh = iter(tensors)
        leaves = [next(fresh) if i is _PLACE else i for i in self._inputs]
        args, kwargs = tree_unflatten(leaves, self._in_tree)
        return args, kwargs


# Stands for a tensor among the arguments of a layer.
_PLACE = object()


# Gives a tap a place in the graph where neither input nor output requires gradients.
ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
_ANCHORED = accumulator_of(ANCHOR)


class Tap(torch.autograd.Function):
    """Identity on a layer's outputs; see Note [How a layer is tapped]."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: Use, num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.num_inputs = len(tensors) - num_outputs
        ctx.save_for_backward(*tensors[num_outputs:])
        return tuple(t.detach() for t in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.use.sink.deliver(ctx.use, ctx.saved_tensors, grads)
        return (None, None, None, *grads, *([None] * ctx.num_inputs))


class _TapOne(torch.autograd.Function):
    """:class:`Tap` for one input and one output, which takes less time."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: Use, output: Tensor, x: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.use.sink.deliver(ctx.use, ctx.saved_tensors, grads)
        return None, None, grads[0], None


tap_one = direct_apply(_TapOne)


def trains() -> bool:
    """Whether the backward pass that runs now is one that forms parameters' gradients.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` ask for the gradients of others.
    """
    return will_run(_ANCHORED)


def differentiable(value: Any) -> bool:
    """Whether this is a tensor that may have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@dataclass(eq=False)
class Record:
    """What the backward pass revealed about one use of a layer.

    Only :meth:`keep` changes its tensors: what is computed from them is computed once.

    Attributes:
        activations: Batch-first inputs of the layer (a ``Call`` for the generic rule).
        backprops: Gradient with respect to its output, batch first.
        rows: Largest number of rows the layer saw in this forward pass.
        reused: Whether the layer was used more than once in this generation.
        forward_pass: The call of the model that it belongs to.
        batch: Number of samples in it.
        device: Where its backprops are.
        tensors: The tensors among activations and backprops.
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
    averaged: int | None = None  # number of rows that a mean of losses is of, if not `rows`
    borrowed: bool = False  # a compiled graph may write over the tensors once they are delivered
    copied: bool = field(default=False, init=False)  # whether that was prevented
    batch: int = field(init=False)
    device: torch.device = field(init=False)
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        first = self.backprops if isinstance(self.backprops, Tensor) else self.backprops[0]
        self.batch, self.device = first.shape[0], first.device
        self._find_tensors()

    def _find_tensors(self) -> None:
        activations, backprops = self.activations, self.backprops
        if type(activations) is tuple and isinstance(backprops, Tensor):
            self.tensors = [*activations, backprops]
        else:
            leaves, _ = tree_flatten((activations, backprops))
            self.tensors = [t for t in leaves if isinstance(t, Tensor)]

    @property
    def mean_of(self) -> int:
        """Number of losses that a mean loss divides by."""
        return self.rows if self.averaged is None else self.averaged

    @property
    def recomputed(self) -> bool:
        """Whether its activations were computed in the backward pass, by a checkpoint."""
        return self.spec.name in self.generation.recomputed

    @cached_property
    def elements(self) -> int:
        """Number of elements of activations and backprops."""
        return sum(t.numel() for t in self.tensors)

    @property
    def backprop_bytes(self) -> int:
        """What it keeps alive beyond the graph."""
        grads = self.backprops if isinstance(self.backprops, tuple) else (self.backprops,)
        return sum(g.nbytes for g in grads)

    def keep(self) -> None:
        """It is used once the backward pass has gone on: copy what is borrowed."""
        if self.borrowed:
            held = (self.activations, self.backprops)
            self.put_tensors(*tree_map_only(Tensor, torch.clone, held))
            self.borrowed, self.copied = False, True
        self.versions = [t._version for t in self.tensors]

    def check_unchanged(self) -> None:
        """Refuse a kept record whose tensors have been overwritten.

        Raises:
            RuntimeError: Names the layer. What is summed would not be what was measured.
        """
        if self.versions is not None and self.versions != [t._version for t in self.tensors]:
            raise RuntimeError(
                f"the input or the output gradient of {self.spec} was changed in place after the "
                "backward pass had come by (by a backward function that overwrites its gradient, "
                "or hooks that bring saved tensors back to one buffer). Use deferred_norm=False "
                "and a mode without _bk, in which only layers that are used several times are kept"
            )

    def put_tensors(self, activations: Any, backprops: Any) -> None:
        """The same values in other tensors, or what stands for them while they are elsewhere."""
        self.activations, self.backprops = activations, backprops
        self._find_tensors()

    def owned(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """``grads`` made from this record, none of which lies in memory that is borrowed."""
        if not self.borrowed:
            return grads
        places = {t.untyped_storage().data_ptr() for t in self.tensors}
        borrowed = {n for n, g in grads.items() if g.untyped_storage().data_ptr() in places}
        return {n: g.clone() if n in borrowed else g for n, g in grads.items()}


def record_of(
    use: Use, tensors: Sequence[Tensor], grads: Sequence[Tensor], rows: int, *, borrowed: bool
) -> Record:
    """The record of a use of a layer in which row i is unit i.

    Args:
        use: Of the layer.
        tensors: Its inputs.
        grads: Gradients with respect to its outputs.
        rows: Largest number of rows that the layer has had in this forward pass.
        borrowed: See :class:`Record`.
    """
    forward_pass, layer, dim = use.forward_pass, use.layer, use.batch_dim
    backprops = [to_front(g.detach(), dim) for g in grads]
    inputs = [to_front(t.detach(), dim) for t in tensors]
    if forward_pass.made_up:  # all rows are nobody's
        backprops = [g[:0] for g in backprops]
        inputs = [t[:0] if t.dim() else t for t in inputs]
    first = backprops[0]
    batch, dtype = first.shape[0], first.dtype
    if layer.reader is not None:
        activations: Any = (first,)
        backprops = [first.new_ones(batch)]
        first = backprops[0]
    elif layer.rule.needs_parameters:
        arguments = use.rebuild(inputs)
        activations = Call.of(layer.module, *arguments, dim, use.spec.params, *use.before)
    elif layer.rule.as_given:
        activations = tuple(inputs)
    else:
        activations = tuple([prepared(t, dtype, batch) for t in inputs])
    return Record(
        layer=layer,
        spec=use.spec,
        activations=activations,
        backprops=first if len(backprops) == 1 else tuple(backprops),
        rows=0 if forward_pass.made_up else max(rows, batch),
        reused=forward_pass.generation.uses.get(use.spec.name, 0) > 1,
        generation=forward_pass.generation,
        forward_pass=forward_pass,
        borrowed=borrowed,
    )


def rows_of(shape: torch.Size, batch_dim: int) -> int:
    """Number of rows of an output of this shape."""
    if len(shape) > 1:
        return shape[batch_dim]
    return shape[0] if shape else 0


def to_front(tensor: Tensor, batch_dim: int) -> Tensor:
    """``tensor`` with the batch in dimension 0."""
    return tensor.transpose(0, 1) if batch_dim == 1 and tensor.dim() > 1 else tensor


def prepared(activation: Tensor, dtype: torch.dtype, batch: int) -> Tensor:
    """A layer's input in the dtype of its output, with a row for each sample."""
    # Autocast lets a layer's input and output differ in dtype.
    if activation.is_floating_point() and activation.dtype != dtype:
        activation = activation.to(dtype)
    if activation.dim() > 1 and activation.shape[0] == 1 and batch != 1:
        activation = activation.expand(batch, *activation.shape[1:])
    return activation
