"""Tensor helpers: per-sample norms, partial sums and unfolding for convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = int | Sequence[int]


def calc_sample_norms(
    named_params: Iterable[tuple[str, Tensor]], *, flat: bool = True
) -> list[Tensor]:
    """L2 norms of per-sample tensors.

    Args:
        named_params: ``(name, tensor)`` pairs, each tensor ``[B, *]``.
        flat: Whether the tensors of a sample count as one long vector.

    Returns:
        With ``flat`` a list of one tensor ``[B]``, else one tensor ``[B]`` per pair.

    Raises:
        ValueError: ``flat`` is set and there are no tensors.
    """
    norms = [calc_sample_norms_one_layer(tensor) for _, tensor in named_params]
    if not flat:
        return norms
    if not norms:
        raise ValueError("named_params is empty: the number of samples is unknown")
    return [torch.linalg.vector_norm(torch.stack(norms), dim=0)]


def calc_sample_norms_one_layer(param: Tensor) -> Tensor:
    """L2 norm ``[B]`` of each sample's part of ``param`` ``[B, *]``; B may be 0."""
    per_sample = param.reshape(param.shape[0], math.prod(param.shape[1:]))
    norms: Tensor = torch.linalg.vector_norm(per_sample, dim=1)
    return norms


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """Sum ``tensor`` over everything between its first and its last ``n_dims`` dimensions.

    Args:
        tensor: ``[B, *, d_1, ..., d_n]``.
        n_dims: Number of trailing dimensions to keep.

    Returns:
        ``[B, d_1, ..., d_n]``; the tensor itself if there is nothing to sum over.

    Raises:
        ValueError: ``tensor`` has fewer than ``n_dims + 1`` dimensions.
    """
    between = tuple(range(1, tensor.dim() - n_dims))
    if tensor.dim() < n_dims + 1:
        raise ValueError(
            f"n_dims={n_dims} needs a tensor of at least {n_dims + 1} dimensions, "
            f"got shape {tuple(tensor.shape)}"
        )
    return tensor.sum(dim=between) if between else tensor


def unfold2d(
    input: Tensor, *, kernel_size: Sizes, padding: Sizes | str, stride: Sizes, dilation: Sizes
) -> Tensor:
    """The patches that a 2-D convolution sees, one column per output position.

    Args:
        input: ``[B, C, H, W]``.
        kernel_size: Height and width of the kernel.
        padding: Zeros on either side of each dimension, ``"same"`` or ``"valid"``.
        stride: Step between patches.
        dilation: Step between the elements of a patch.

    Returns:
        ``[B, C * prod(kernel_size), L]`` with L output positions.

    Raises:
        ValueError: ``input`` does not have four dimensions, or another argument does
            not suit a 2-D convolution.
    """
    return _unfold(input, 2, kernel_size, padding, stride, dilation)


def unfold3d(
    tensor: Tensor,
    *,
    kernel_size: Sizes,
    padding: Sizes | str = 0,
    stride: Sizes = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The patches that a 3-D convolution sees, one column per output position.

    Args:
        tensor: ``[B, C, D, H, W]``.
        kernel_size: Depth, height and width of the kernel.
        padding: Zeros on either side of each dimension, ``"same"`` or ``"valid"``.
        stride: Step between patches.
        dilation: Step between the elements of a patch.

    Returns:
        ``[B, C * prod(kernel_size), L]`` with L output positions.

    Raises:
        ValueError: ``tensor`` does not have five dimensions, or another argument does
            not suit a 3-D convolution.
    """
    return _unfold(tensor, 3, kernel_size, padding, stride, dilation)


def filter_dilated_rows(
    tensor: Tensor,
    dilation: Sequence[int],
    dilated_kernel_size: Sequence[int],
    kernel_size: Sequence[int],
) -> Tensor:
    """Keep the elements of dilated patches that the kernel touches.

    Args:
        tensor: Patches; the last dimensions are those of the dilated kernel.
        dilation: Step between the elements to keep.
        dilated_kernel_size: Extent of the kernel, ``dilation * (kernel_size - 1) + 1``.
        kernel_size: Number of elements to keep in each dimension.

    Returns:
        ``tensor`` with its last dimensions cut down to ``kernel_size``.

    Raises:
        ValueError: The sizes contradict each other.
    """
    picked: list[Any] = [
        slice(0, extent, step) for extent, step in zip(dilated_kernel_size, dilation, strict=True)
    ]
    filtered = tensor[(..., *picked)]
    if tuple(filtered.shape[-len(picked) :]) != tuple(kernel_size):
        raise ValueError(
            f"kernel_size={tuple(kernel_size)} does not follow from dilation={tuple(dilation)} "
            f"and dilated_kernel_size={tuple(dilated_kernel_size)} on a tensor of shape "
            f"{tuple(tensor.shape)}"
        )
    return filtered


def _unfold(
    tensor: Tensor,
    n: int,
    kernel_size: Sizes,
    padding: Sizes | str,
    stride: Sizes,
    dilation: Sizes,
) -> Tensor:
    if tensor.dim() != n + 2:
        raise ValueError(
            f"a {n}-D convolution takes a tensor of {n + 2} dimensions [B, C, *], "
            f"got shape {tuple(tensor.shape)}"
        )
    kernel = _per_dimension("kernel_size", kernel_size, n)
    steps = _per_dimension("stride", stride, n)
    dilations = _per_dimension("dilation", dilation, n)
    extent = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True))
    patches = F.pad(tensor, _both_sides(padding, extent, n))
    if any(size < e for size, e in zip(patches.shape[2:], extent, strict=True)):
        raise ValueError(
            f"kernel_size={kernel} with dilation={dilations} is larger than the padded input "
            f"{tuple(patches.shape[2:])}"
        )
    for axis in range(n):
        patches = patches.unfold(axis + 2, extent[axis], steps[axis])
    patches = filter_dilated_rows(patches, dilations, extent, kernel)
    # [B, C, *positions, *kernel] -> [B, C, *kernel, *positions]
    positions, offsets = range(2, n + 2), range(n + 2, 2 * n + 2)
    patches = patches.permute(0, 1, *offsets, *positions)
    rows = tensor.shape[1] * math.prod(kernel)
    return patches.reshape(tensor.shape[0], rows, math.prod(patches.shape[-n:]))


def _both_sides(padding: Sizes | str, extent: tuple[int, ...], n: int) -> list[int]:
    """Padding as ``F.pad`` wants it: last dimension first, before and after."""
    if padding == "same":
        sides = [((e - 1) // 2, e - 1 - (e - 1) // 2) for e in extent]
    elif padding == "valid":
        sides = [(0, 0)] * n
    elif isinstance(padding, str):
        raise ValueError(f"padding must be 'same', 'valid' or sizes, got {padding!r}")
    else:
        sides = [(p, p) for p in _per_dimension("padding", padding, n)]
    return [side for pair in reversed(sides) for side in pair]


def _per_dimension(name: str, sizes: Sizes, n: int) -> tuple[int, ...]:
    if isinstance(sizes, int):
        return (sizes,) * n
    if len(sizes) != n:
        raise ValueError(f"{name} must be one size or {n} sizes, got {tuple(sizes)}")
    return tuple(sizes)
