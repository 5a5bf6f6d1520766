"""Weighted sums of per-sample gradients, written straight to where they are needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.core.kernels.choice import triton_is_installed
from opacus.core.kernels.reference import widen

# Columns of half-precision gradients that are widened at once, where there is no kernel.
PART_ELEMENTS = 1 << 16


def weighted_sum(
    grads: Tensor, factors: Tensor, excluded: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """``sum_i factors[i] * grads[i]`` over the samples that are not excluded.

    Args:
        grads: ``[B, *shape]``.
        factors: ``[B]``, fp32 or fp64.
        excluded: ``[B]`` bool; these rows contribute nothing even if they are not finite.
            ``None``: there are none.
        out: Where to write the result, of the same shape, any dtype and strides;
            by default a new tensor in at least fp32.

    Returns:
        ``[*shape]``. On a GPU nothing waits for the device.
    """
    shape = grads.shape[1:]
    if out is None:
        out = widen(grads.new_empty(0)).new_empty(shape)
    if grads.shape[0] == 0:
        return out.zero_()
    if out.is_contiguous() and can_batch(grads, factors):
        if excluded is None:
            excluded = torch.zeros(len(grads), dtype=torch.bool, device=grads.device)
        segment = max(1, out.numel())
        weighted_sums([grads], [factors], excluded, out.view(1, -1), [0], [segment])
        return out
    if excluded is not None and (grads.is_cuda or bool(excluded.any())):
        rows = excluded.to(grads.device).view(-1, *[1] * (grads.dim() - 1))
        grads = grads.masked_fill(rows, 0.0)
    wide = widen(grads.new_empty(0)).dtype
    factors, flat = factors.to(device=grads.device, dtype=wide), grads.reshape(len(grads), -1)
    if grads.dtype == wide:
        return out.copy_((factors @ flat).view(shape))
    target = out if out.is_contiguous() else torch.empty(shape, dtype=out.dtype, device=out.device)
    pieces = zip(flat.split(PART_ELEMENTS, 1), target.view(-1).split(PART_ELEMENTS), strict=True)
    for part, place in pieces:  # so that little is held in the wide type
        place.copy_(factors @ widen(part))
    return out if target is out else out.copy_(target)


def can_batch(grads: Tensor, factors: Tensor) -> bool:
    """Whether :func:`weighted_sums` takes these per-sample gradients."""
    return (
        grads.is_cuda
        and factors.is_cuda
        and factors.dtype == torch.float32
        and grads.is_contiguous()
        and grads.is_floating_point()
        and triton_works()
    )


def weighted_sums(
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    excluded: Tensor,
    out: Tensor,
    starts: Sequence[int],
    segments: Sequence[int],
) -> None:
    """Many :func:`weighted_sum` s on a GPU, one launch for each dtype.

    Args:
        grads: ``[B, *shape]`` each; :func:`can_batch` holds.
        factors: ``[B]`` for each.
        excluded: ``[B]`` bool.
        out: ``[W, n]``. Sum k is written to ``out[:, starts[k] : starts[k] + segments[k]]``,
            row after row.
    """
    from opacus.core.kernels import weighted_sum_triton as gpu

    by_dtype: dict[torch.dtype, list[gpu.Sum]] = {}
    for grad, factor, start, segment in zip(grads, factors, starts, segments, strict=True):
        by_dtype.setdefault(grad.dtype, []).append(gpu.Sum(grad, factor, start, segment))
    for sums in by_dtype.values():
        gpu.launch(sums, excluded, out, out.stride(0))


def weighted_sum_each(
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    excluded: Tensor,
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """One :func:`weighted_sum` for each tensor of per-sample gradients.

    Args:
        grads: ``[B, *shape]`` each.
        factors: ``[B]`` for each.
        excluded: ``[B]`` bool.
        dtypes: Dtype of each result.

    Returns:
        ``[*shape]`` each. Where they are formed in one launch they share their storage.
    """
    results: dict[int, Tensor] = {}
    together: dict[torch.dtype, list[int]] = {}
    for place, (grad, factor, dtype) in enumerate(zip(grads, factors, dtypes, strict=True)):
        if len(grad) and can_batch(grad, factor):
            together.setdefault(dtype, []).append(place)
        else:
            rows = excluded[: len(grad)]
            out = grad.new_empty(grad.shape[1:], dtype=dtype)
            results[place] = weighted_sum(grad, factor[: len(grad)], rows, out=out)
    for dtype, places in together.items():
        sizes = [grads[place][0].numel() for place in places]
        flat = torch.empty(1, sum(sizes), dtype=dtype, device=excluded.device)
        parts = flat[0].split(sizes)
        starts = [part.storage_offset() for part in parts]
        chosen = [grads[p] for p in places], [factors[p] for p in places]
        weighted_sums(*chosen, excluded, flat, starts, [max(1, size) for size in sizes])
        results |= {p: t.view(grads[p].shape[1:]) for p, t in zip(places, parts, strict=True)}
    return [results[place] for place in range(len(grads))]


@functools.cache
def triton_works() -> bool:
    """Whether Triton is installed and there is a GPU that it compiles for."""
    return triton_is_installed() and torch.cuda.is_available()
