"""A linear head and its loss as one layer; see :mod:`opacus.core.kernels.loss.head`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from opacus.core.kernels.loss.head import Head, LossOptions, Wanted, sweep, token_losses
from opacus.core.kernels.norms.reference import wide_dtype
from opacus.core.platform.sharded import is_dtensor
from opacus.core.platform.torch_internals import outside_graphs
from opacus.core.record.layers import Layer
from opacus.core.record.record import ANCHOR, Tap, Use
from opacus.core.rules.head_loss import HeadLossRule, HiddenGradient, as_activations
from opacus.core.rules.spec import LayerSpec, layer_kind
from opacus.core.rules.tensor_parallel import TensorParallelRule

# Attribute of the output of a head that has computed its loss: the HeadUse.
HEAD_USE = "_opacus_head_loss"


@outside_graphs
def losses_of_head(
    hidden: Tensor, head: nn.Module, targets: Tensor, options: LossOptions
) -> Tensor:
    """``[B, T]`` losses of a head's logits for ``targets``, at least fp32.

    The head is called, so that all its hooks run, with the loss in the place of its logits.

    Args:
        hidden: ``[B, T, d]``.
        head: ``nn.Linear`` with V outputs.
        targets: ``[B, T]`` integers.
        options: Of the loss.

    Raises:
        ValueError: Of other shapes or kinds.
    """
    before = head.__dict__.get("forward")

    def forward(x: Tensor) -> Tensor:
        return head_losses(x, head, targets, options)

    head.forward = forward  # type: ignore[assignment]
    try:
        losses: Tensor = head(hidden)
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before
    return losses


def head_losses(hidden: Tensor, head: nn.Module, targets: Tensor, options: LossOptions) -> Tensor:
    """What a head's forward returns in place of its logits; see :func:`losses_of_head`."""
    _check(hidden, head, targets)
    weight: Any = head.weight
    bias: Any = head.bias
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    gradient, targets = HiddenGradient(), targets.to(hidden.device)
    losses, lse = _HeadLoss.apply(hidden, weight, bias, targets, options, gradient)
    own = Head(hidden, weight.detach(), None if bias is None else bias.detach(), targets, lse)
    setattr(losses, HEAD_USE, HeadUse(own, HeadLossRule(options, gradient)))
    return losses  # type: ignore[no-any-return]


def _check(hidden: Tensor, head: nn.Module, targets: Tensor) -> None:
    if layer_kind(head) is not nn.Linear or head._compiled_call_impl is not None:
        raise ValueError(
            f"the loss without logits needs an nn.Linear as its head that is not compiled by "
            f"itself, got {type(head).__name__}: an adapter or a cap on the logits would be left "
            "out. Use an ordinary criterion"
        )
    if hidden.dim() != 3 or targets.shape != hidden.shape[:2] or is_dtensor(hidden):
        raise ValueError(
            f"the loss without logits takes plain hidden states [B, T, d] and targets [B, T], got "
            f"{type(hidden).__name__} {tuple(hidden.shape)} and {tuple(targets.shape)}"
        )
    if is_dtensor(head.weight):
        raise ValueError(
            "the head's weight is sharded now: call the loss without logits inside of the model's "
            "forward, or shard the head by itself (fully_shard(model.head)), or the root with "
            "reshard_after_forward=False"
        )


class HeadUse:
    """What a head that has computed its loss leaves for the tap on it."""

    def __init__(self, head: Head, rule: HeadLossRule) -> None:
        self.head, self.rule = head, rule

    def layer(self, layer: Layer, spec: LayerSpec, batch_dim: int) -> Layer:
        """The head as a layer with the rule of its loss.

        Raises:
            ValueError: It is split by tensor parallelism, or time comes first.
        """
        if isinstance(layer.rule, TensorParallelRule) or batch_dim != 0:
            raise ValueError(
                f"{spec} computes its loss without logits, which takes neither tensor parallelism "
                "nor batch_first=False: use an ordinary criterion"
            )
        return replace(layer, rule=self.rule)

    def tap(self, use: Use, losses: Tensor) -> Tensor:
        """The losses, tapped with all that their gradients are made of."""
        if losses.shape != self.head.targets.shape:
            raise ValueError(
                f"{use.spec} computes its loss from {tuple(self.head.targets.shape)} hidden "
                f"states for {losses.shape[0]} samples: give it a row for each sample"
            )
        tapped: Tensor = Tap.apply(ANCHOR, use, 1, losses, *as_activations(self.head))[0]
        return tapped


class _HeadLoss(torch.autograd.Function):
    """Losses ``[B, T]`` and log-sum-exps; backward forms the logits' gradients part by part."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LossOptions,
        gradient: HiddenGradient,
    ) -> tuple[Tensor, Tensor]:
        losses, lse = torch.ops.opacus.head_loss(
            hidden, weight, bias, targets, options.ignore_index, options.smoothing, options.z_loss
        )
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.options, ctx.gradient = options, gradient
        ctx.mark_non_differentiable(lse)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor, _: Any) -> Any:
        head = Head(*ctx.saved_tensors)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide, hidden = wide_dtype(head.hidden), head.hidden
        wanted = Wanted()
        formed = ctx.gradient.take(grads)
        if needs_hidden and formed is None:
            formed = wanted.hidden = torch.zeros_like(hidden, dtype=wide)
        if needs_weight:
            wanted.total = torch.zeros_like(head.weight, dtype=wide)
        if needs_bias:
            wanted.total_bias = torch.zeros_like(head.bias, dtype=wide)  # type: ignore[arg-type]
        if wanted != Wanted():
            sweep(head, grads, ctx.options, wanted)
        return (
            formed.to(hidden.dtype) if needs_hidden and formed is not None else None,
            None if wanted.total is None else wanted.total.to(head.weight.dtype),
            None if wanted.total_bias is None else wanted.total_bias.to(head.weight.dtype),
            *(None, None, None),
        )


def _head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    options = LossOptions(ignore_index, smoothing, z_loss)
    return token_losses(hidden, weight, bias, targets, options)


# An operator of its own, which the trail of units follows (see record/trail/computes.py).
_library = torch.library.Library("opacus", "FRAGMENT")
_library.define(
    "head_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index, "
    "float smoothing, float z_loss) -> (Tensor, Tensor)"
)
for _kind in ("CPU", "CUDA"):
    _library.impl("head_loss", _head_loss, _kind)
