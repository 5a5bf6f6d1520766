"""The tap of a layer whose per-sample gradients autograd carries, so that it needs no record.

See Note [Carriers] in :mod:`opacus.core.ranks.carried`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from opacus.core.platform.torch_internals import direct_apply
from opacus.core.record.head_loss import HEAD_USE
from opacus.core.record.layers import Layer
from opacus.core.record.passes import ForwardPass
from opacus.core.rules.base import Carried
from opacus.core.rules.spec import LayerSpec


class Carriers(NamedTuple):
    """Where what a layer's backward makes goes.

    Attributes:
        form: What it makes of the layer's input and of the gradient of its output.
        tensors: One carrier for each result.
        dims: Of the layer's output.
    """

    form: Carried
    tensors: tuple[Tensor, ...]
    dims: int


HALF = (torch.float16, torch.bfloat16)


def _both(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return x, grad


# Of a layer that is kept: a record is made of both. It can be used once.
BOTH: Carried = _both, ()


class HasCarriers(Protocol):
    """The hooks of a layer.

    Attributes:
        carriers: ``None`` where it has a record.
    """

    layer: Layer
    carriers: Carriers | None


class Carries(Protocol):
    """What lets parts of the model carry their gradients.

    Attributes:
        choices: What was decided for the layers that the latest pass has carried.
        running: Whether a forward pass with carriers runs.
        learning: What the latest pass may teach; ``None``: nothing.
    """

    choices: dict[str, Any]
    running: bool
    learning: Any

    @property
    def manner(self) -> Hashable:
        """How the pass that runs does what it does for its layers."""

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

    def check_again(self, spec: LayerSpec, forward_pass: ForwardPass) -> None:
        """A checkpoint runs a layer of a compiled graph again, which is about to get a record."""


def carries(carriers: Carriers, args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a layer turned one tensor with a row for each sample into another one.

    Of a dtype that the carriers take as it is: autograd would round the gradients to theirs.
    """
    if len(args) != 1 or kwargs or type(args[0]) is not Tensor or type(output) is not Tensor:
        return False
    x, batch, dtype = args[0], carriers.tensors[0].shape[0], carriers.tensors[0].dtype
    rows = (
        x.is_floating_point()
        and output.is_floating_point()
        and x.dim() == output.dim() == carriers.dims > 1
        and x.shape[0] == output.shape[0] == batch
        and (output.dtype == dtype or (dtype == torch.float32 and output.dtype in HALF))
        and (torch.compiler.is_compiling() or not hasattr(output, HEAD_USE))
    )
    return rows and (carriers.form[0] is not _both or _alike(carriers.tensors, (x, output)))


def _alike(carriers: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> bool:
    """Whether these tensors can be the gradients of carriers as they are."""
    pairs = zip(carriers, tensors, strict=True)
    return all(c.shape == t.shape and c.dtype == t.dtype for c, t in pairs)


def carry(hooks: HasCarriers, carriers: Carriers, x: Tensor, output: Tensor) -> Tensor:
    """``output`` of a layer that was called with ``x``; its gradients go to the carriers.

    What a compiled graph reads here has to be equal in equal layers, so that they share it: no
    rule or spec, whose name differs.
    """
    tapped: Tensor
    form, constants = carriers.form
    if form is _both:  # those of two uses would be added
        hooks.carriers = None
    if torch.compiler.is_compiling():
        tapped = _Carried.apply(output, x, None, form, constants, *carriers.tensors)
    else:
        tapped = _carried(output, x, hooks.layer.spec, form, constants, *carriers.tensors)
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
    """An identity whose backward gives the carriers what their form makes of ``x`` and gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor,
        spec: LayerSpec | None,
        form: Callable[..., tuple[Tensor, ...]],
        constants: tuple[Any, ...],
        *carriers: Tensor,
    ) -> Tensor:
        ctx.spec, ctx.form, ctx.constants = spec, form, constants
        if not torch.compiler.is_compiling():
            ctx.save_for_backward(x)
            return output.detach()
        ctx.save_for_backward(x, torch.ops.opacus.note_input(x))
        # What follows the graph may change this one in place.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, *note), grad = ctx.saved_tensors, grads[0]
        if torch.compiler.is_compiling():
            torch.ops.opacus.find_input(x, *note)
        elif torch.is_grad_enabled():
            raise twice_differentiated(ctx.spec)
        return grad, None, None, None, None, *ctx.form(x, grad, *ctx.constants)


_carried = direct_apply(_Carried)
