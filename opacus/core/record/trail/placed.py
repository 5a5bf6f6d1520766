"""Elements that a mask puts into rows, as features of pictures are put among tokens.

Note [Placed rows]
    Where a mask is true depends on values, so whose rows the elements come into has to be looked at
    in every forward pass. If the source holds equal parts of all units, in their order, and the
    target has a row for each, one look at the mask is enough: each row takes as many elements.
    So a pass with such operations need not be followed as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opacus.core.record.trail.labels import Labels

_CALLS = frozenset((torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_))


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


class PlacedRows(TorchFunctionMode):
    """Looks at the masks of a forward pass that is not followed.

    Args:
        count: Number of units.

    Attributes:
        seen: So many masks.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = 0
        self._count = count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CALLS:
            self._look(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

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
