"""The norm computations that rules use, as one exchangeable set.

``reference`` is plain PyTorch. ``flash`` takes, for each operation and size, whichever of
the Triton kernels and the reference was faster on this card; without a GPU it is the
reference. Both give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.norms import choice, reference

KERNELS = ("reference", "flash")


@dataclass(frozen=True)
class NormKernels:
    """How norms are computed.

    Attributes:
        name: ``"reference"`` or ``"flash"``.
        product: Activations ``[B, T, d]`` and backprops ``[B, T, p]`` to ``||A_i^T G_i||^2``.
        products: ``product`` of several layers, some of which may have the same activations.
        product_cost: Multiply-adds a sample of it, from T, d and p.
        bias: Backprops ``[B, T, p]`` to ``||sum_t G_it||^2``.
        affine: Norms of a normalisation layer's weight and bias in one pass, or ``None``.
        embedding: Norm of a lookup table's gradient from ids ``[B, T]``, or ``None``.
        grouped: ``product`` of many layers of any shapes in one launch, or ``None``.
    """

    name: str
    product: Callable[[Tensor, Tensor], Tensor]
    products: Callable[[Sequence[tuple[Tensor, Tensor]]], list[Tensor]]
    product_cost: Callable[[int, int, int], int]
    bias: Callable[[Tensor], Tensor]
    affine: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    embedding: Callable[[Tensor, Tensor, int | None], Tensor] | None = None
    grouped: Callable[[Sequence[tuple[Tensor, Tensor]]], list[Tensor]] | None = None

    def __reduce__(self) -> Any:
        return kernels_named, (self.name,)


def kernels_named(name: str) -> NormKernels:
    """The set of this name.

    Raises:
        ValueError: It is not one of :data:`KERNELS`.
    """
    if name not in KERNELS:
        raise ValueError(f"kernels must be one of {KERNELS}, got {name!r}")
    return FLASH if name == "flash" else REFERENCE


def _bias(backprops: Tensor) -> Tensor:
    return reference.sum_of_squares(backprops.sum(1, dtype=reference.wide_dtype(backprops)))


def _flash_cost(tokens: int, d: int, p: int) -> int:
    """Cost of products alone: no intermediate result leaves the chip."""
    return min(tokens * d * p, tokens * (tokens + 64) // 2 * (d + p))


def _flash_product(activations: Tensor, backprops: Tensor) -> Tensor:
    return _flash_shared(activations, [backprops])[0]


def _flash_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    for places in reference.by_input(pairs):
        norms = _flash_shared(pairs[places[0]][0], [pairs[place][1] for place in places])
        results |= zip(places, norms, strict=True)
    return [results[place] for place in range(len(pairs))]


def _flash_shared(activations: Tensor, backprops: Sequence[Tensor]) -> list[Tensor]:
    empty = activations.numel() == 0 or any(g.numel() == 0 for g in backprops)
    if empty or activations.shape[1] == 1 or torch.is_autocast_enabled(activations.device.type):
        return [reference.product_norm_sq(activations, g) for g in backprops]
    return choice.shared_product_norm_sq(activations, backprops)


REFERENCE = NormKernels(
    name="reference",
    product=reference.product_norm_sq,
    products=reference.products_norm_sq,
    product_cost=reference.product_cost,
    bias=_bias,
)
FLASH = NormKernels(
    name="flash",
    product=_flash_product,
    products=_flash_products,
    product_cost=_flash_cost,
    bias=choice.bias_norm_sq,
    affine=choice.affine_norm_sq,
    embedding=choice.embedding_norm_sq,
    grouped=choice.grouped_product_norm_sq,
)
