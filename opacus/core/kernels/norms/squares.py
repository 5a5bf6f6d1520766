"""Squared norms of many tensors' rows, in one pass and few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.core.kernels.norms.choice import is_usable
from opacus.core.kernels.norms.reference import FEW_SAMPLES, sums_of_squares

# Shorter rows are left to PyTorch, unless they are few: a program takes one row or a part of one.
ROW_ELEMENTS = 256


def squares_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Squared norms ``[B]`` of the rows of each ``[B, *shape]``, in fp32 (fp64 for fp64).

    The definition is :func:`opacus.core.kernels.norms.reference.sum_of_squares`.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    others: list[int] = []
    for place, tensor in enumerate(tensors):
        if has_kernel(tensor):
            alike.setdefault((tensor.dtype, tensor.device), []).append(place)
        else:
            others.append(place)
    found: dict[int, Tensor] = {}
    if others:
        found |= zip(others, sums_of_squares([tensors[p] for p in others]), strict=True)
    for places in alike.values():
        from opacus.core.kernels.norms import squares_triton

        own = [tensors[place] for place in places]
        rows = [tensor.shape[0] for tensor in own]
        found |= zip(places, squares_triton.launch(own, rows).split(rows), strict=True)
    return [found[place] for place in range(len(tensors))]


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]`` norms of whole tensors, at least one; the same numbers in each call.

    They are on the device of the first. Of half precision, on a CPU they are rounded to it.
    """
    first, elements = tensors[0], 0
    alike = is_usable(first) and first.is_floating_point()
    for tensor in tensors if alike else ():
        elements += tensor.numel()
        same = tensor.dtype == first.dtype and tensor.device == first.device
        alike = alike and same and tensor.is_contiguous()
    if not alike or not elements:
        return stacked_norms(torch._foreach_norm(list(tensors)))
    from opacus.core.kernels.norms import squares_triton

    return squares_triton.launch(tensors, [1] * len(tensors)).sqrt()


def stacked_norms(norms: Sequence[Tensor]) -> Tensor:
    """``[n]``, on the device of the first."""
    first = norms[0].device
    return torch.stack([norm if norm.device == first else norm.to(first) for norm in norms])


def has_kernel(tensor: Tensor) -> bool:
    """Whether the kernel takes the rows of ``[B, *shape]``."""
    rows, size = tensor.shape[0], tensor.numel()
    if not size or (rows > FEW_SAMPLES and size < rows * ROW_ELEMENTS):
        return False
    return tensor.is_floating_point() and is_usable(tensor) and tensor.is_contiguous()
