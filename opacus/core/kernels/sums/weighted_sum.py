"""Weighted sums of per-sample gradients, written straight to where they are needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from opacus.core.kernels.host.operands import (
    ALIGNMENT,
    FLOAT8,
    converts_float8,
    triton_is_installed,
)
from opacus.core.kernels.norms.reference import wide_dtype
from opacus.core.platform.sizes import SHARED_ELEMENTS, SUMMED_ELEMENTS, WIDENED_ELEMENTS

T = TypeVar("T")


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
    stored_in_8 = grads.dtype == FLOAT8
    shape, wide = grads.shape[1:], wide_dtype(factors if stored_in_8 else grads)
    if grads.shape[0] == 0:
        return grads.new_zeros(shape, dtype=wide) if out is None else out.zero_()
    if can_batch(grads, factors) and (out is None or _has_rows(out)):
        return _weighted_sum_on_gpu(grads, factors, excluded, out)
    if excluded is not None and stored_in_8:  # always finite
        factors = factors.masked_fill(excluded.to(factors.device), 0.0)
    elif excluded is not None:
        rows = excluded.to(grads.device).view(-1, *[1] * len(shape))
        grads = grads.masked_fill(rows, 0.0)
    factors, flat = factors.to(device=grads.device, dtype=wide), grads.reshape(len(grads), -1)
    if grads.dtype == wide:
        total = torch.mv(flat.t(), factors).view(shape)
        return total if out is None else out.copy_(total)
    if out is None:
        out = grads.new_empty(shape, dtype=wide)
    target = out if out.is_contiguous() else torch.empty(shape, dtype=out.dtype, device=out.device)
    pieces = zip(
        flat.split(WIDENED_ELEMENTS, 1), target.view(-1).split(WIDENED_ELEMENTS), strict=True
    )
    for part, place in pieces:  # so that little is held in the wide type
        place.copy_(factors @ part.to(wide))
    return out if target is out else out.copy_(target)


def _weighted_sum_on_gpu(
    grads: Tensor, factors: Tensor, excluded: Tensor | None, out: Tensor | None
) -> Tensor:
    """:func:`weighted_sum` by a kernel, to where :func:`_has_rows` holds."""
    if out is None:
        out = grads.new_empty(grads.shape[1:], dtype=wide_dtype(grads))
    rows = out.view(1, -1) if out.is_contiguous() else out
    weighted_sums([grads], [factors], excluded, rows, [0], [max(1, rows.shape[1])])
    return out


def _has_rows(out: Tensor) -> bool:
    """Whether it is contiguous, or ``[W, n]`` with contiguous rows: a part of a bucket."""
    return out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1)


def can_batch(grads: Tensor, factors: Tensor) -> bool:
    """Whether :func:`weighted_sums` takes these per-sample gradients."""
    return (
        grads.is_cuda
        and factors.is_cuda
        and factors.dtype == torch.float32
        and grads.is_contiguous()
        and grads.is_floating_point()
        and triton_works()
        and (grads.dtype != FLOAT8 or converts_float8(grads.get_device()))
    )


def weighted_sums(
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    excluded: Tensor | None,
    out: Tensor,
    starts: Sequence[int],
    segments: Sequence[int],
) -> None:
    """Many :func:`weighted_sum` s on a GPU, in few launches.

    Args:
        grads: ``[B, *shape]`` each; :func:`can_batch` holds.
        factors: ``[B]`` for each.
        excluded: ``[B]`` bool; ``None``: there are none.
        out: ``[W, n]``. Sum k is written to ``out[:, starts[k] : starts[k] + segments[k]]``,
            row after row.
    """
    _launch(grads, factors, excluded, out, out.stride(0), starts, segments)


def _launch(
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    excluded: Tensor | None,
    out: Tensor,
    stride: int,
    starts: Sequence[int],
    segments: Sequence[int],
) -> None:
    """:func:`weighted_sums` with a stride: one launch for each dtype, and for odd sizes."""
    from opacus.core.kernels.sums import weighted_sum_triton as gpu

    alike: dict[Hashable, list[gpu.Sum]] = {}
    for grad, factor, start, segment in zip(grads, factors, starts, segments, strict=True):
        # What cannot be read 16 bytes at a time would slow down all others of its launch.
        sizes = stride | start | segment | grad.numel() // max(1, grad.shape[0])
        odd = bool(sizes % ALIGNMENT or grad.data_ptr() % ALIGNMENT)
        sums = alike.setdefault((grad.dtype, odd), [])
        sums.append(gpu.Sum(grad, factor, start, segment))
    for sums in alike.values():
        gpu.launch(sums, excluded, out, stride)


def _launch_into(
    targets: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    excluded: Tensor | None,
) -> None:
    """Each sum to where its target lies; targets have one dtype, and are contiguous."""
    base = max(targets, key=Tensor.numel)  # an empty one has no address
    size = base.element_size()
    starts = [(target.data_ptr() - base.data_ptr()) // size for target in targets]
    segments = [target.numel() for target in targets]  # where it is 0, nothing is launched
    _launch(grads, factors, excluded, base, 0, starts, segments)


def weighted_sum_each(
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    excluded: Tensor | None,
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """One :func:`weighted_sum` for each tensor of per-sample gradients.

    Args:
        grads: ``[B, *shape]`` each.
        factors: ``[B]`` for each.
        excluded: ``[B]`` bool; ``None``: there are none.
        dtypes: Dtype of each result.

    Returns:
        ``[*shape]`` each. Those that are formed together share their storage.
    """
    results: dict[int, Tensor] = {}
    together: dict[torch.dtype, list[int]] = {}
    alike: dict[Hashable, list[int]] = {}
    for place, (grad, factor, dtype) in enumerate(zip(grads, factors, dtypes, strict=True)):
        rows = grad.shape[0]  # not its length, which takes ten times as long
        if rows and can_batch(grad, factor):
            together.setdefault(dtype, []).append(place)
            continue
        # Small ones of the same samples are copied into one.
        small = 0 < grad.numel() <= SUMMED_ELEMENTS
        key = (rows, id(factor), grad.dtype, grad.device, dtype) if small else place
        alike.setdefault(key, []).append(place)
    for places in alike.values():
        first = places[0]
        sums = _as_one([grads[p] for p in places], factors[first], excluded, dtypes[first])
        results |= dict(zip(places, sums, strict=True))
    for dtype, places in together.items():
        sums = _in_one_launch(
            [grads[p] for p in places], [factors[p] for p in places], excluded, dtype
        )
        results |= dict(zip(places, sums, strict=True))
    return [results[place] for place in range(len(grads))]


def scale_in_place(
    grads: Sequence[Tensor], factors: Sequence[Tensor], excluded: Tensor | None
) -> bool:
    """Multiply the gradients ``[1, *shape]`` of one sample by its factors, where they lie.

    Args:
        grads: Overwritten, on a GPU in few launches.
        factors: ``[1]`` for each.
        excluded: ``[1]`` bool; if set all become 0. ``None``: it is not.

    Returns:
        Whether it was done: not if two of them share memory, as gradients of a sum do, or lie on
        different devices, nor where there is no kernel. Then nothing has been written.
    """
    storages = {grad.untyped_storage().data_ptr() for grad in grads}
    alone = len(storages) == len(grads) and len({grad.device for grad in grads}) <= 1
    if not alone or not all(map(can_batch, grads, factors)):
        return False
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, grad in enumerate(grads):
        by_dtype.setdefault(grad.dtype, []).append(place)
    for places in by_dtype.values():
        own = [grads[place] for place in places]
        _launch_into(own, own, [factors[place] for place in places], excluded)
    return True


def _as_one(
    grads: Sequence[Tensor], factors: Tensor, excluded: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """:func:`weighted_sum` of tensors with the same samples and factors, as of one."""
    rows, whole = grads[0].shape[0], grads[0]
    if len(grads) > 1:
        flat = [grad if grad.dim() == 2 else grad.reshape(rows, -1) for grad in grads]
        whole = torch.cat(flat, dim=1)
    shape = whole.shape[1:]
    out = None if dtype == wide_dtype(whole) else whole.new_empty(shape, dtype=dtype)
    excluded = None if excluded is None else excluded[:rows]
    total = weighted_sum(whole, factors[:rows], excluded, out=out)
    if len(grads) == 1:
        return [total]
    return _parts(total, grads, [_elements(grad) for grad in grads])


def _parts(flat: Tensor, grads: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """A vector cut into tensors with the shapes of ``grads`` without their samples."""
    pairs = zip(flat.split(sizes), grads, strict=True)
    return [part if grad.dim() == 2 else part.view(grad.shape[1:]) for part, grad in pairs]


def _elements(grads: Tensor) -> int:
    """Elements of a sample's gradient; taking one out costs more than both of these."""
    return grads.numel() // grads.shape[0]


def consecutive(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in a row whose sizes add up to at most ``most``, or a larger one alone."""
    part: list[T] = []
    size = 0
    for item in items:
        own = size_of(item)
        if part and size + own > most:
            yield part
            part, size = [], 0
        part.append(item)
        size += own
    if part:
        yield part


def _in_one_launch(
    grads: Sequence[Tensor],
    factors: Sequence[Tensor],
    excluded: Tensor | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """:func:`weighted_sum_each` on a GPU; small results share their storage."""
    device, sizes = grads[0].device, [_elements(grad) for grad in grads]
    results: list[Tensor] = []
    for part in consecutive(range(len(grads)), sizes.__getitem__, SHARED_ELEMENTS):
        if len(part) == 1:  # cutting it out of a larger one would take three times as long
            shape = grads[part[0]].shape[1:]
            results.append(torch.empty(shape, dtype=dtype, device=device))
            continue
        flat = torch.empty(sum(sizes[p] for p in part), dtype=dtype, device=device)
        results += _parts(flat, [grads[p] for p in part], [sizes[p] for p in part])
    _launch_into(results, grads, factors, excluded)
    return results


@functools.cache
def triton_works() -> bool:
    """Whether Triton is installed and there is a GPU that it compiles for."""
    return triton_is_installed() and torch.cuda.is_available()
