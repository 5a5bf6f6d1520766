"""Norm computations in plain PyTorch, exact, with bounded memory.

Letters: B samples, T tokens, d and p features, V rows of a table.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opacus.core.kernels.host.operands import SUPPORTED, triton_is_installed
from opacus.core.kernels.norms.trusted import TRUSTED, in_tf32
from opacus.core.platform.sizes import (
    CHUNK_ELEMENTS,
    GROUP_ELEMENTS,
    MOST_STACKED,
    SQUARED_ELEMENTS,
    STACK_ELEMENTS,
)

# What writing and reading one element of an intermediate result costs, in the
# multiply-adds that the matrix units do in that time.
ELEMENT_COST = 64
# Rows of a Gram matrix formed at once; what lies left of the diagonal is skipped.
GRAM_ROWS = 512
# Parts of products have a multiple of so many rows or columns.
TILE = 64
# Wide Gram matrices have a multiple of so many columns: others take a GPU several times the time.
EVEN = 8
# Elements whose norm is taken at once on a CPU.
NORM_PART = 4096
# Up to so many samples their gradients' norms are computed as separate tensors.
FEW_SAMPLES = 8


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of :func:`widen`, of all of these."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def widen(tensor: Tensor) -> Tensor:
    """At least fp32: sums of squares of half precision over- and underflow."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def sum_of_squares(tensor: Tensor) -> Tensor:
    """``[B, ...] -> [B]``, accumulated in at least fp32, in one pass over memory."""
    norms = _norms(tensor)
    return _parts_sum_of_squares(tensor) if norms is None else norms.square()


def sums_of_squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`sum_of_squares` of many tensors ``[B, ...]``, in few launches."""
    if tensors and all([t.is_cuda for t in tensors]) and triton_is_installed():
        from opacus.core.kernels.norms import squares_triton

        found = squares_triton.squares_of(tensors)
        if found is not None:
            return found
    few = all(t.is_cuda and 0 < t.shape[0] <= FEW_SAMPLES for t in tensors)
    if not few or any(t.dtype == torch.float64 for t in tensors):
        return _squares(tensors)
    results = squares_of_equals(tensors)
    left = [i for i in range(len(tensors)) if i not in results]
    for dtype in {tensors[i].dtype for i in left}:  # one dtype a call, or it goes one by one
        places = [i for i in left if tensors[i].dtype == dtype]
        rows = [row for i in places for row in tensors[i].unbind()]
        norms = torch.stack(torch._foreach_norm(rows, 2, dtype=torch.float32)).square()
        parts = norms.split([tensors[i].shape[0] for i in places])
        results |= dict(zip(places, parts, strict=True))
    return [results[i] for i in range(len(tensors))]


def squares_of_equals(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """:func:`sum_of_squares` of those that are not large and have equals, by their places.

    Adapters are hundreds of tensors of a few shapes: to copy them together takes the host less time
    than to launch, and to make, something for each row of each.
    """
    groups: dict[Any, list[int]] = {}
    for place, t in enumerate(tensors):
        if 0 < t.numel() <= GROUP_ELEMENTS:
            groups.setdefault((t.shape, t.dtype, t.device), []).append(place)
    results: dict[int, Tensor] = {}
    for (shape, _, _), places in groups.items():
        most = max(1, STACK_ELEMENTS // math.prod(shape))
        for start in range(0, len(places) if len(places) > 1 else 0, most):
            some = places[start : start + most]
            rows = torch.stack([tensors[place] for place in some])
            rows = rows.reshape(len(some) * shape[0], -1)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide_dtype(rows)).square()
            results |= dict(zip(some, norms.view(len(some), shape[0]).unbind(), strict=True))
    return results


def _squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One by one, but small ones of equal shape together."""
    results: list[Tensor | None] = [None] * len(tensors)
    groups: dict[Any, list[int]] = {}
    for place, t in enumerate(tensors):
        if 0 < t.numel() <= SQUARED_ELEMENTS and t[:1].numel() <= NORM_PART:
            groups.setdefault((t.shape, t.dtype, t.device), []).append(place)
        else:
            results[place] = sum_of_squares(t)
    for places in groups.values():
        stacked = torch.stack([tensors[place] for place in places])
        stacked = stacked.reshape(*stacked.shape[:2], -1)
        norms = torch.linalg.vector_norm(stacked, dim=2, dtype=wide_dtype(stacked))
        for place, value in zip(places, norms.square().unbind(), strict=True):
            results[place] = value
    return results  # type: ignore[return-value]


def _norms(tensor: Tensor) -> Tensor | None:
    """``[B]`` norms of the rows, ``None`` where they are too long for one sum on a CPU."""
    size = math.prod(tensor.shape[1:])
    if not size or (size > NORM_PART and not tensor.is_cuda):
        return None
    flat = tensor.reshape(tensor.shape[0], size)
    if size == 1:
        return widen(flat[:, 0]).abs()
    return torch.linalg.vector_norm(flat, dim=1, dtype=wide_dtype(tensor))


def _parts_sum_of_squares(tensor: Tensor) -> Tensor:
    """:func:`sum_of_squares` on a CPU, a part at a time.

    The rounding errors of ``vector_norm`` grow with the number of elements there, to 1e-3
    at 16 million.
    """
    total = tensor.new_zeros(tensor.shape[0], dtype=wide_dtype(tensor))
    if tensor.numel() == 0:
        return total
    flat = tensor.reshape(tensor.shape[0], -1)
    even = flat.shape[1] // NORM_PART * NORM_PART
    parts = flat[:, :even].unflatten(1, (-1, NORM_PART))
    total += torch.linalg.vector_norm(parts, dim=2, dtype=total.dtype).square().sum(1)
    if even < flat.shape[1]:
        rest = torch.linalg.vector_norm(flat[:, even:], dim=1, dtype=total.dtype)
        total += rest.square()
    return total


def product_norm_sq(activations: Tensor, backprops: Tensor) -> Tensor:
    """``||A_i^T G_i||_F^2`` for each sample, the norm of a linear layer's weight gradient.

    Args:
        activations: ``[B, T, d]``.
        backprops: ``[B, T, p]``, same dtype.

    Returns:
        ``[B]`` in fp32 (fp64 for fp64).
    """
    batch, tokens, _ = activations.shape
    if activations.numel() == 0 or backprops.numel() == 0:
        return backprops.new_zeros(batch, dtype=wide_dtype(backprops))
    if tokens == 1:
        return sum_of_squares(activations) * sum_of_squares(backprops)
    if not activations.is_cuda:  # there is no half-precision product with an fp32 result
        activations, backprops = widen(activations), widen(backprops)
    if _takes_gram(activations, backprops):
        return gram_norm_sq(activations, backprops)
    return width_norm_sq(activations, backprops)


def products_norm_sq(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """:func:`product_norm_sq` of several layers; those with one input share its Gram matrix."""
    results: list[Tensor | None] = [None] * len(pairs)
    groups: dict[Any, list[int]] = {}
    for place in [place for same in by_input(pairs) for place in same]:
        a, g = pairs[place]
        stacks = a.dtype == g.dtype and (a.is_cuda or widen(a) is a) and a.shape[1] > 1
        if stacks and a.numel() and g.numel() and _takes_gram(a, g):
            groups.setdefault((a.shape[:2], a.dtype, a.device), []).append(place)
        else:
            results[place] = product_norm_sq(a, g)
    for (shape, _, _), places in groups.items():
        most = _most_stacked(*shape)
        for start in range(0, len(places), most):
            some = places[start : start + most]
            for place, value in zip(some, gram_norms_sq([pairs[i] for i in some]), strict=True):
                results[place] = value
    return results  # type: ignore[return-value]


def by_input(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[list[int]]:
    """Places of the pairs whose activations are the same memory together, in order of the first.

    That order does not depend on addresses, which change from step to step.
    """
    groups: dict[Any, list[int]] = {}
    for place, (a, _) in enumerate(pairs):
        # All are alive, so that equal addresses are the same memory; 0 stands for none.
        key = (a.data_ptr() or -1 - place, a.shape, a.stride(), a.dtype, a.device)
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _takes_gram(activations: Tensor, backprops: Tensor) -> bool:
    """Whether Gram matrices are cheaper, and the host need not wait to see if they are exact."""
    _, tokens, d = activations.shape
    cheaper = gram_is_cheaper(tokens, d, backprops.shape[2])
    return cheaper and not in_tf32(activations) and _can_settle(activations)


def gram_is_cheaper(tokens: int, d: int, p: int) -> bool:
    """Whether Gram matrices cost less than the product ``A^T G``."""
    return _gram_cost(tokens, d, p) < _width_cost(tokens, d, p)


def product_cost(tokens: int, d: int, p: int) -> int:
    """What :func:`product_norm_sq` costs a sample, in multiply-adds."""
    return min(_gram_cost(tokens, d, p), _width_cost(tokens, d, p))


def _gram_cost(tokens: int, d: int, p: int) -> int:
    # Tiles left of the diagonal are skipped.
    return tokens * (tokens + min(tokens, GRAM_ROWS)) // 2 * (d + p + ELEMENT_COST)


def _width_cost(tokens: int, d: int, p: int) -> int:
    return tokens * d * p + ELEMENT_COST * d * p


def width_norm_sq(activations: Tensor, backprops: Tensor) -> Tensor:
    """:func:`product_norm_sq` by forming ``A^T G`` a few samples and columns at a time."""
    batch, _, d = activations.shape
    columns = _in_tiles(CHUNK_ELEMENTS // (batch * d))
    if columns >= backprops.shape[2]:
        return sum_of_squares(wide_bmm(backprops.transpose(1, 2), activations))
    samples = max(1, CHUNK_ELEMENTS // d) if columns == 1 else batch
    totals = []
    for a, g in zip(activations.split(samples), backprops.split(samples), strict=True):
        parts = [
            sum_of_squares(wide_bmm(part.transpose(1, 2), a)) for part in g.split(columns, dim=2)
        ]
        totals.append(torch.stack(parts).sum(0))
    return torch.cat(totals)


def _in_tiles(most: int) -> int:
    """So many rows or columns of a part: products of odd parts take twice the time on a GPU."""
    return most - most % TILE if most >= TILE else max(1, most)


def gram_norm_sq(activations: Tensor, backprops: Tensor) -> Tensor:
    """:func:`product_norm_sq` as ``sum_ts (A A^T)_ts (G G^T)_ts``, a few rows at a time.

    Samples whose terms cancel are computed by :func:`width_norm_sq`.
    """
    return gram_norms_sq([(activations, backprops)])[0]


def gram_norms_sq(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """:func:`gram_norm_sq` of L layers of one B, T and dtype, in few launches.

    Args:
        pairs: Activations and backprops; those with the same activations are neighbours.
    """
    batch, tokens, _ = pairs[0][0].shape
    step = _in_tiles(min(CHUNK_ELEMENTS // (len(pairs) * batch * tokens), GRAM_ROWS))
    starts = [same[0] for same in by_input(pairs)]
    inputs = [bisect.bisect(starts, place) - 1 for place in range(len(pairs))]
    first, second = [pairs[place][0] for place in starts], [g for _, g in pairs]
    parts: list[Tensor] = []  # [2, L, B, S] each: sums of the terms, and of their absolute values
    for start in range(0, tokens, step):
        left, right = _gram_rows(first, start, step), _gram_rows(second, start, step)
        # Both are symmetric: what is beyond the square of these rows counts twice.
        parts.append(_of_products(left, right, inputs, once=left.shape[2]))
    return _settle(pairs, parts[0] if len(parts) == 1 else torch.cat(parts, 3))


def stacked_bytes(activations: Tensor, backprops: Tensor) -> int:
    """Most bytes of Gram matrices that :func:`products_norm_sq` has at once of one layer."""
    batch, tokens, d = activations.shape
    if tokens == 1 or not gram_is_cheaper(tokens, d, backprops.shape[2]):
        return 0
    tokens = _columns(activations, 0)
    rows = max(1, min(CHUNK_ELEMENTS // max(1, batch * tokens), GRAM_ROWS, tokens))
    return 2 * batch * tokens * rows * wide_dtype(activations, backprops).itemsize


def _most_stacked(batch: int, tokens: int) -> int:
    """Layers whose Gram matrices, two of each, are formed at once."""
    from_memory = CHUNK_ELEMENTS // (2 * batch * tokens * min(tokens, GRAM_ROWS))
    return max(1, min(from_memory, MOST_STACKED))


def _gram_rows(tensors: Sequence[Tensor], start: int, step: int) -> Tensor:
    """``[n, B, t, s]``: rows of ``X X^T`` from the diagonal on, with zeros up to :data:`EVEN`."""
    batch, tokens, _ = tensors[0].shape
    columns = _columns(tensors[0], start)
    rows, more, dtype = min(step, columns), columns - tokens + start, wide_dtype(tensors[0])
    grams = tensors[0].new_empty(len(tensors), batch, rows, columns, dtype=dtype)
    for x, gram in zip(tensors, grams.unbind(), strict=True):
        rest = x if start == 0 else x[:, start:]
        rest = F.pad(rest, (0, 0, 0, more)) if more else rest
        wide_bmm(rest if rows == columns else rest[:, :rows], rest.transpose(1, 2), out=gram)
    return grams


def _columns(x: Tensor, start: int) -> int:
    """Columns of the Gram matrices of ``[B, T, d]`` from one of its tokens on."""
    tokens = x.shape[1]
    return tokens - start + (-tokens % EVEN if tokens > TILE else 0)


def _of_products(left: Tensor, right: Tensor, inputs: Sequence[int], once: int) -> Tensor:
    """``[2, L, B, S]``: parts of each layer's sums of terms, and of absolute values.

    Args:
        left: ``[I, B, t, s]``.
        right: ``[L, B, t, s]``, overwritten; a term is a product of its elements with those of the
            layer's ``left``.
        inputs: The place in ``left`` of each layer.
        once: Columns that count once; the others count twice.
    """
    if left.is_cuda and left.dtype == torch.float32:
        from opacus.core.kernels.norms import terms_triton

        return terms_triton.sums_and_sizes(left, right, inputs, once)
    for place, terms in zip(inputs, right.unbind(), strict=True):
        terms *= left[place]
    right[..., once:] *= 2
    return sums_and_sizes(right.flatten(0, 1)).view(2, *right.shape[:2], 1)


def sums_and_sizes(terms: Tensor) -> Tensor:
    """``[B, t, s] -> [2, B]``: sums of each sample's terms, and of their absolute values."""
    both = torch.empty(2, len(terms), dtype=terms.dtype, device=terms.device)
    torch.sum(terms, (1, 2), out=both[0])
    torch.linalg.vector_norm(terms, 1, dim=(1, 2), out=both[1])
    return both


def _settle(pairs: Sequence[tuple[Tensor, Tensor]], total: Tensor) -> list[Tensor]:
    """The norms by Gram matrices where they can be trusted, the others computed directly.

    Args:
        pairs: Activations ``[B, T, d]`` and backprops ``[B, T, p]`` of L layers.
        total: ``[2, L, B, S]``: parts of the sums of the products of both Gram matrices' elements,
            and of their absolute values.
    """
    if total.is_cuda:
        from opacus.core.kernels.norms import direct

        return direct.settle_all(pairs, total)
    norms, size = total.sum(3)
    doubtful = ~(norms > TRUSTED * size)  # what is zero or not finite, too
    results = list(norms.unbind())
    if not bool(doubtful.any()):
        return results
    for place, (a, g) in enumerate(pairs):
        samples = doubtful[place].nonzero().squeeze(1)
        if len(samples):
            mended = width_norm_sq(a[samples], g[samples])
            results[place] = results[place].index_copy(0, samples, mended)
    return results


def _can_settle(activations: Tensor) -> bool:
    """Whether :func:`_settle` finds doubtful norms without making the host wait."""
    if not activations.is_cuda:
        return True
    if activations.dtype not in SUPPORTED or not triton_is_installed():
        return False
    from opacus.core.kernels.norms import direct

    return direct.works(activations.device)


def table_norm_sq(rows: Tensor, samples: Tensor, values: Tensor, batch: int) -> Tensor:
    """Squared norm of each sample's gradient of a table, repeated rows added first.

    Args:
        rows: ``[N]`` rows of the table, one for each lookup.
        samples: ``[N]`` sample that each lookup belongs to.
        values: ``[N, d]`` gradients of the looked-up rows.
        batch: Number of samples B.

    Returns:
        ``[B]`` in fp32 (fp64 for fp64). Memory is O(N d), whatever the table's size, and
        nothing waits for the device.
    """
    total = values.new_zeros(batch, dtype=wide_dtype(values))
    if values.numel() == 0:
        return total
    slots, owners = distinct_pairs(rows, samples)
    for part in values.split(max(1, CHUNK_ELEMENTS // len(rows)), dim=1):
        sums = part.new_zeros(part.shape, dtype=wide_dtype(part)).index_add_(0, slots, widen(part))
        total.index_add_(0, owners, sums.square().sum(1))
    return total


def distinct_pairs(rows: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers the distinct pairs of sample and row.

    Returns:
        ``[N]`` number of each lookup's pair, and ``[N]`` sample of each number (0 for
        numbers that are not used: how many there are is not known without waiting).
    """
    rows, samples = rows.long(), samples.long()
    pairs, order = (samples * (rows.max() + 1) + rows).sort()
    fresh = torch.zeros_like(pairs)
    fresh[1:] = pairs[1:] != pairs[:-1]
    numbers = fresh.cumsum(0)
    slots = torch.empty_like(numbers).scatter_(0, order, numbers)
    owners = torch.zeros_like(numbers).scatter_(0, numbers, samples[order])
    return slots, owners


def wide_bmm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched product with an fp32 result (fp64 for fp64) and no half-precision rounding."""
    device = left.device.type
    if torch.is_autocast_enabled(device):  # the backward pass may run under it
        with torch.autocast(device, enabled=False):
            return wide_bmm(left, right, out)
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(left, right, out_dtype=torch.float32, out=out)
    return torch.bmm(widen(left), widen(right), out=out)
