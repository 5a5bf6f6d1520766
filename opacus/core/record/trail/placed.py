"""Elements that a mask puts into rows, as features of pictures are put among tokens.

Note [Joined parts]
    A program that takes a tensor apart (``list(x)``) and joins the parts may do so in an order
    that values say. In passes that are not followed each join is looked at: parts that lie in
    memory one after the other are in the order that they had.

Note [Placed rows]
    Where a mask is true depends on values, so whose rows the elements come into has to be looked at
    in every forward pass. If the source holds equal parts of all units, in their order, and the
    target has a row for each, one look at the mask is enough: each row takes as many elements.
    So a pass with such operations need not be followed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opacus.core.record.trail.labels import Labels

_CALLS = frozenset((torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_))
_JOINS = frozenset(
    (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.vstack, torch.hstack)
)


def in_order(target: Labels, source: Labels, size: torch.Size, count: int) -> bool:
    """Whether a target has a row for each unit, and a source of this size parts in their order."""
    units = torch.arange(count, device=target.ids.device)
    rows = target.ids.shape[0] == target.ids.numel() == count
    if not (rows and torch.equal(target.ids.reshape(-1), units)) or size[0] % count:
        return False
    ids = source.ids.expand(size[0], *source.ids.shape[1:]).unflatten(0, (count, -1))
    return bool((ids.flatten(1) == units[:, None].to(ids.device)).all())


def each_row_takes_its_part(target: Tensor, mask: Tensor, source: Tensor, count: int) -> bool:
    """Whether a mask puts equal parts of a source into the rows of a target."""
    if target.dim() == 0 or target.shape[0] != count or source.numel() % count:
        return False
    mask, times = mask.expand(target.shape), 1
    if mask.dim() > 1 and mask.stride(-1) == 0:
        mask, times = mask[..., :1], target.shape[-1]
    taken = mask.flatten(1).sum(1) * times
    return bool((taken == source.numel() // count).all())


def in_line(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are the parts of one, one after the other."""
    if len(tensors) < 2:
        return False
    first = tensors[0]
    step = tensors[-1].storage_offset() - first.storage_offset()
    step //= max(1, len(tensors) - 1)
    return step > 0 and all(
        t.untyped_storage()._cdata == first.untyped_storage()._cdata
        and t.storage_offset() == first.storage_offset() + place * step
        and (t.shape, t.stride()) == (first.shape, first.stride())
        for place, t in enumerate(tensors)
    )


class PlacedRows(TorchFunctionMode):
    """Looks at the masks of a forward pass that is not followed, and at what is joined in any.

    Args:
        count: Number of units.
        masks: Whether it looks at masks.

    Attributes:
        seen: So many masks.
        joined: In so many operations the parts of a tensor, in their order.
    """

    def __init__(self, count: int, *, masks: bool) -> None:
        super().__init__()
        self.seen = self.joined = 0
        self._count = count
        self._masks = masks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CALLS and self._masks:
            self._look(*args, **(kwargs or {}))
        elif func in _JOINS:
            self._look_at_join(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _look_at_join(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        self.joined += isinstance(tensors, Tensor) or in_line(tensors)

    def _look(self, input: Any, mask: Any, source: Any) -> None:
        if source.requires_grad or not torch.is_grad_enabled():  # see ``Op.hidden``
            self.seen += 1
            if not each_row_takes_its_part(input.detach(), mask, source.detach(), self._count):
                raise ValueError(_OTHERS)


_OTHERS = (
    "masked_scatter puts more elements into the rows of one sample than into those of another, as "
    "with two pictures in one text and none in the next: they are of no single sample then, as row "
    "i of the pictures is taken for sample i's. Give each text as many pictures, or freeze what "
    "computes their features and train the rest"
)
