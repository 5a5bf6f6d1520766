"""One use of a layer and the tap on its output; see :mod:`opacus.core.record.recorder`."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from opacus.core.platform.torch_internals import accumulator_of, direct_apply, will_run
from opacus.core.record.layers import Layer
from opacus.core.record.record import ForwardPass
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
        sink: Takes what the backward pass brings.
        batch_dim: Dimension of inputs and outputs that counts samples.
        inputs: The layer's inputs as leaves of ``in_tree``; both ``None`` for a layer
            that was called with one tensor.
    """

    __slots__ = (
        "__weakref__", "_in_tree", "_inputs", "batch_dim", "buffers", "forward_pass", "layer",
        "refusal", "repeated", "sink", "spec", "units",
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
        self.sink = sink
        self.batch_dim = batch_dim
        self.layer = layer
        self.spec = spec
        self.units: Units | None = None  # of its rows, if they are not the units themselves
        self.refusal: str | None = None  # what to say if its rows, nobody's, get a gradient
        self.repeated = False  # whether one output was repeated for all samples
        self.buffers = layer.buffers_before
        self.forward_pass = forward_pass
        # Tensors are the tap's to save; only their places are remembered here.
        self._inputs = [_PLACE if isinstance(i, Tensor) else i for i in inputs or ()]
        self._in_tree = in_tree

    def register(self, output_shape: torch.Size, *, counted: bool) -> None:
        """Note that the layer ran; a recomputation is not counted as another use."""
        if not counted or self.refusal is not None:
            return
        name, generation = self.spec.name, self.forward_pass.generation
        generation.uses[name] = generation.uses.get(name, 0) + 1
        generation.waiting.add(self)
        units, rows = self.units, rows_of(output_shape, self.batch_dim)
        if units is not None and units.count > 1:
            rows = units.count  # its record will be grouped by them
        self.forward_pass.saw(name, rows)

    def rebuild(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments, with ``tensors`` in the places of the original ones."""
        if self._in_tree is None:
            return (tensors[0],), {}
        fresh = iter(tensors)
        leaves = [next(fresh) if i is _PLACE else i for i in self._inputs]
        args, kwargs = tree_unflatten(leaves, self._in_tree)
        return args, kwargs


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


def differentiable(value: Any) -> bool:
    """Whether this is a tensor that may have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
