"""The tap on a layer's output; see :mod:`opacus.core.record.recorder`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus.core.platform.torch_internals import accumulator_of, direct_apply, will_run
from opacus.core.record.record import Use

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
