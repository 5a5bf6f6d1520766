"""The norm of a gradient that a lookup table and a linear layer share: ``||H + E||_F^2``.

``H = sum_t g_t a_t^T`` is the layer's and ``E = sum_s 1_{id_s} e_s^T`` the table's, both
``[V, d]``. Neither is formed: ``<H, E> = sum_ts (a_t . e_s) g_t[id_s]`` needs of the layer's
gradients only what belongs to rows that were looked up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opacus.core.kernels.norms.reference import sums_and_sizes, wide_bmm, wide_dtype


class Heads(NamedTuple):
    """What the norm needs of the layer.

    Attributes:
        inputs: ``[B, T, d]``, a.
        looked_up: ``[B, T, S]``, the outputs' gradients g at the rows that were looked up.
        sums: ``[2, B]``: squared norm of H, and of what absolute values it is the sum.
    """

    inputs: Tensor
    looked_up: Tensor
    sums: Tensor


def sums_of(head: Heads, lookups: Tensor, table_norm_sq: Tensor) -> Tensor:
    """``[2, B]``: squared norm of H + E, and of what absolute values it is the sum.

    Args:
        head: Of the layer.
        lookups: ``[B, S, d]``, e; zero for a padding row.
        table_norm_sq: ``[B]``, squared norm of E.
    """
    a = head.inputs
    if a.dtype != lookups.dtype:  # autocast rounds what the layer is given, and not the table's
        wide = torch.promote_types(wide_dtype(a), wide_dtype(lookups))
        a, lookups = a.to(wide), lookups.to(wide)
    terms = wide_bmm(a, lookups.transpose(1, 2))  # [B, T, S]
    terms *= head.looked_up
    return head.sums + torch.stack([table_norm_sq] * 2) + 2 * sums_and_sizes(terms)


def at_rows(grads: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    """``[B, T, c], [B, S] -> [B, T, S]``: gradients at the outputs ``ids``, from ``start`` on.

    Zero at those that are not among the c.
    """
    places = ids.long() - start
    inside = (places >= 0) & (places < grads.shape[2])
    index = places.where(inside, 0)[:, None, :].expand(-1, grads.shape[1], -1)
    return grads.gather(2, index).masked_fill_(~inside[:, None, :], 0.0)
