"""The privacy unit of each row of a layer, as a value that travels with a record.

A *unit* is what differs between neighbouring data sets: a sample, a user, a document of a packed
row. What is clipped is the gradient of a unit: the sum over all rows that belong to it.

Norms, plans and sums know one case only, row i is unit i. A record of any other kind is *regrouped*
when it is made (:mod:`opacus.core.record.regroup`): row u of the new one holds all rows of unit u.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Units:
    """The unit of each row of a layer's output, where row i is not unit i.

    Exactly one of ``dim``, ``block`` and ``ids`` is given.

    Attributes:
        count: Number of units n of the batch.
        dim: Entry i of this dimension is unit i.
        block: Rows ``block * u`` to ``block * (u + 1) - 1`` are of unit u.
        ids: ``[R]`` (of rows) or ``[R, T, ...]`` (of rows and tokens), int64: the unit of each,
            -1 for rows of nobody (padding, made-up rows). A size of 1 stands for any size.
        drops: Gradients of nobody's rows are left out, as the user asked for; otherwise they are
            an error.
    """

    count: int
    dim: int | None = None
    block: int | None = None
    ids: Tensor | None = None
    drops: bool = False
    _places: dict[tuple[torch.Size, torch.device], tuple[Tensor, Tensor | None]] = field(
        default_factory=dict, init=False, repr=False
    )

    def over(self, shape: torch.Size, device: torch.device) -> Tensor:
        """``ids`` for rows and tokens ``shape``.

        Raises:
            ValueError: There are units within what ``shape`` counts as one token.
        """
        assert self.ids is not None
        ids = self.ids.to(device)
        own = ids.shape[: len(shape)]
        fits = len(own) == ids.dim() and all(o in (1, s) for o, s in zip(own, shape, strict=False))
        if not fits:
            raise ValueError(f"units of {tuple(ids.shape)} do not fit rows of {tuple(shape)}")
        return ids.reshape(*own, *[1] * (len(shape) - len(own))).expand(shape)

    def places(self, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Where the tokens of each unit are, with those of all rows in one line.

        Args:
            shape: Rows and tokens.
            device: Where the answer is wanted.

        Returns:
            ``[n, K]`` places, K that of the largest unit, and ``[n, K]`` bool: which of them only
            fill up a smaller unit; ``None`` if there are none.
        """
        key = (shape, device)
        if key not in self._places:
            self._places[key] = _places(self.over(shape, device).reshape(-1), self.count)
        return self._places[key]

    def in_front(self) -> tuple[int, Units]:
        """The dimension that has the units, and the units once it is the first one."""
        ids = self.ids
        if ids is None or ids.dim() < 2 or ids.numel() != ids.shape[-1]:
            return self.dim or 0, self
        return ids.dim() - 1, replace(self, ids=ids.reshape(-1))

    def renamed(self, names: Tensor, count: int) -> Units:
        """The same rows, where unit i has another name.

        Args:
            names: ``[n]`` int64, -1 for nobody.
            count: Number of units under the new names.
        """
        if self.ids is not None:
            known = torch.cat([names, names.new_full((1,), -1)])  # -1 stays -1
            return Units(count, ids=known[self.ids.to(names.device)], drops=True)
        if self.block is not None:
            return Units(count, ids=names.repeat_interleave(self.block), drops=True)
        return Units(count, ids=names.reshape(*[1] * (self.dim or 0), -1), drops=True)


def units_of(ids: Tensor, shape: torch.Size, count: int, batch_dim: int) -> Units | None:
    """The units of a tensor; ``None`` if entry i of its batch dimension is unit i.

    Args:
        ids: The unit of each element, -1 for nobody's; of size 1 where it does not vary.
        shape: Of the tensor.
        count: Number of units, at least 1.
        batch_dim: The dimension in which samples are expected.
    """
    varying = [d for d, size in enumerate(ids.shape) if size > 1]
    line = ids.reshape(-1)
    if not len(line) and shape[batch_dim : batch_dim + 1] == (count,):
        return None  # rows without elements
    if not varying and count == 1 and int(line[0]) == 0:
        only = shape[batch_dim : batch_dim + 1] == (1,)
        return None if only else Units(1, block=shape[0] if shape else 1)
    if len(varying) == 1 and len(line) % count == 0:
        dim, block = varying[0], len(line) // count
        if torch.equal(line, torch.arange(count, device=ids.device).repeat_interleave(block)):
            if block == 1:
                return None if dim == batch_dim else Units(count, dim=dim)
            if dim == 0:
                return Units(count, block=block)
    last = 1 + max(varying, default=0)
    return Units(count, ids=ids.reshape(ids.shape[:last]).clone())


def in_order(ids: Tensor, count: int, batch_dim: int) -> Tensor | None:
    """``ids`` with nobody's rows filled in, where the others are the units in their order.

    Args:
        ids: See :func:`units_of`.
        count: Number of units.
        batch_dim: The dimension in which they are expected; others are tried after it.

    Returns:
        ``None`` if no row is nobody's, or all are, or others are not in the units' order.
    """
    known = ids >= 0
    if bool(known.all()) or not bool(known.any()):
        return None
    for dim in sorted(range(ids.dim()), key=lambda d: d != batch_dim):
        block, rest = divmod(ids.shape[dim], count)
        if rest or not block or (block > 1 and dim > 0):
            continue
        line = torch.arange(count, device=ids.device).repeat_interleave(block)
        line = line.view([-1 if d == dim else 1 for d in range(ids.dim())])
        if bool(((ids == line) | ~known).all()):
            return line
    return None


def only_unit(shape: torch.Size, batch_dim: int) -> Units | None:
    """The units of a tensor in a batch of one, which owns all rows; see :func:`units_of`."""
    one_row = len(shape) > batch_dim and shape[batch_dim] == 1
    return None if one_row else Units(1, block=shape[0])


def _places(ids: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """See :meth:`Units.places`; ``ids`` ``[N]``."""
    order = ids.argsort(stable=True)
    order = order[int((ids < 0).sum()) :]
    counts = ids[order].bincount(minlength=count)
    longest = int(counts.max()) if count else 0
    if longest * count == len(order):
        return order.view(count, longest), None
    steps = torch.arange(longest, device=ids.device)
    filler = steps >= counts[:, None]
    starts = (counts.cumsum(0) - counts)[:, None]
    places = order[(starts + steps).clamp_(max=len(order) - 1)]
    return places.masked_fill_(filler, 0), filler
