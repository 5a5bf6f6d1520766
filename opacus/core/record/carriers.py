"""The tap of a layer whose per-sample gradients autograd carries, so that it needs no record.

See Note [Carriers] in :mod:`opacus.core.ranks.carried`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch
from torch import Tensor

from opacus.core.platform.torch_internals import direct_apply
from opacus.core.record.head_loss import HEAD_USE
from opacus.core.record.layers import Layer
from opacus.core.record.passes import ForwardPass
from opacus.core.rules.base import as_tokens
from opacus.core.rules.linear import TransposedLinearRule, products_of_rows
from opacus.core.rules.spec import LayerSpec


class Carries(Protocol):
    """What lets units carry their gradients.

    Attributes:
        choices: What was decided for the layers that the latest pass has carried.
    """

    choices: dict[str, Any]

    def begin(self, forward_pass: ForwardPass, inputs: Any, *, rows_are_units: bool) -> None:
        """The model's forward begins; it is recorded."""

    def end(self) -> None:
        """It has ended or failed."""

    def learn(self, passes: Collection[ForwardPass], kept: Any, choices: Mapping[str, Any]) -> None:
        """A step with records has been measured."""

    def forget(self) -> None:
        """Memory has run out: layers have records again."""

    def carries_some_of(self, layers: AbstractSet[str]) -> bool:
        """Whether any of these layers has no record in the pass that runs now."""


def carries(carriers: tuple[Tensor, ...], args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a layer turned one tensor with a row for each sample into another one.

    Of the dtype that was learnt: autograd would round the gradients to the carriers'.
    """
    if len(args) != 1 or kwargs or type(args[0]) is not Tensor or type(output) is not Tensor:
        return False
    x, batch = args[0], carriers[0].shape[0]
    return (
        x.is_floating_point()
        and output.is_floating_point()
        and x.dim() == output.dim() > 1
        and x.shape[0] == output.shape[0] == batch
        and output.dtype == carriers[0].dtype
        and (torch.compiler.is_compiling() or not hasattr(output, HEAD_USE))
    )


def carry(carriers: tuple[Tensor, ...], layer: Layer, x: Tensor, output: Tensor) -> Tensor:
    """``output`` of a layer that was called with ``x``; its gradients go to the carriers.

    What a compiled graph reads here has to be equal in equal layers, so that they share it: no
    rule or spec, whose name differs.
    """
    tapped: Tensor
    transposed, weight = isinstance(layer.rule, TransposedLinearRule), carriers[0].dim() == 3
    if torch.compiler.is_compiling():
        tapped = _Carried.apply(output, x, None, transposed, weight, *carriers)
    else:
        tapped = _carried(output, x, layer.spec, transposed, weight, *carriers)
    return tapped


def twice_differentiated(spec: LayerSpec) -> RuntimeError:
    """The error for a backward pass whose result is to be differentiated again."""
    return RuntimeError(
        f"a gradient through {spec} is taken with create_graph=True, of the private "
        "model in train mode. What a second backward pass (of a gradient penalty, say) "
        "asks of the parameters cannot be clipped here. Use grad_sample_mode='no_op' and "
        "form per-sample gradients by torch.func (vmap of grad), or call disable_hooks() "
        "or eval() before the forward pass if parameters do not learn from it"
    )


class _Carried(torch.autograd.Function):
    """An identity whose backward forms the per-sample gradients of a linear layer.

    They are those of :meth:`LinearRule.per_sample_grad`, with the weight's first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor,
        spec: LayerSpec | None,
        transposed: bool,
        weight: bool,
        *carriers: Tensor,
    ) -> Tensor:
        ctx.spec, ctx.transposed, ctx.weight = spec, transposed, weight
        ctx.bias = len(carriers) > weight
        ctx.save_for_backward(x)
        if torch.compiler.is_compiling():  # what follows the graph may change this one in place
            return torch.ops.aten._unsafe_view(output, output.shape)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), grad = ctx.saved_tensors, grads[0]
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise twice_differentiated(ctx.spec)
        rows, g = [], as_tokens(grad)
        if ctx.weight:
            x = as_tokens(x.to(grad.dtype))  # autocast lets a layer's input and output differ
            rows.append(products_of_rows(x, g) if ctx.transposed else products_of_rows(g, x))
        if ctx.bias:
            rows.append(g.sum(1))
        return grad, None, None, None, None, *rows


_carried = direct_apply(_Carried)
