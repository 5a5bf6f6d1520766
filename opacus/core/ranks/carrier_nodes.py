"""The nodes that carriers come out of; see Note [Carriers] in :mod:`opacus.core.ranks.carried`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus.core.ranks.lone_parts import UseOfParts
from opacus.core.record.carriers import twice_differentiated
from opacus.core.record.record import Use
from opacus.core.rules.spec import LayerSpec

# Where what a layer carries goes: to its record, or to gradients of these names; of one name, that
# of a weight which each sample has for itself.
Target = Use | tuple[str, ...] | str


class PartNode(torch.autograd.Function):
    """Its outputs are the carriers of a part, whose gradients it hands on."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        use: UseOfParts,
        targets: list[Target],
        likes: list[Tensor],
        spec: LayerSpec,
    ) -> tuple[Tensor, ...]:
        ctx.carried, ctx.targets, ctx.spec = use, targets, spec
        ctx.set_materialize_grads(False)
        return tuple([like.detach() for like in likes])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise twice_differentiated(ctx.spec)
        formed: dict[str, Tensor] = {}
        rest = iter(grads)
        for target in ctx.targets:
            if isinstance(target, str):
                grad = next(rest)
                if grad is not None:
                    formed[target] = grad.mT.contiguous()  # of the view [d, p]
            elif isinstance(target, Use):
                x, grad = next(rest), next(rest)
                if x is not None and grad is not None:  # what took no part has none
                    target.sink.deliver(target, (x,), (grad,))
            else:
                formed.update({owner: grad for owner in target if (grad := next(rest)) is not None})
        ctx.carried.deliver(formed)
        return None, None, None, None, None


class Unused(torch.autograd.Function):
    """Carriers of a layer that a checkpoint runs again: those of the forward pass get gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, spec: LayerSpec, likes: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.spec = spec
        return tuple([like.detach() for like in likes])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"a checkpoint has run {ctx.spec} again, and a gradient is taken through what that "
            "gave: use checkpoint(..., use_reentrant=False). Nothing was added to the model"
        )


def with_rows(like: Tensor, batch: int | None) -> Tensor:
    """A carrier's model for so many samples."""
    known = like.shape[0]  # not its length, which takes ten times as long
    return like if batch is None or batch == known else like[0].expand(batch, *like.shape[1:])


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device whose elements are one."""
    return tensor.new_zeros(()).expand(tensor.shape)
