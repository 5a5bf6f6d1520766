"""Sensitivity by leaving units out: how much one unit really changes the clipped sum.

The promise of clipping is checked as it is stated: the sum of a batch and that of the batch without
one unit differ by at most C. Nothing else is assumed about how the sum came about, so coupled
losses, shifted factors, missing clipping and rows of another unit all show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from opacus.auditing.report import AuditReport, Finding


def leave_one_out(
    step: Callable[[Any], Any],
    optimizer: Any,
    batch: Any,
    *,
    units: Iterable[int] | None = None,
    tolerance: float = 1e-3,
) -> AuditReport:
    """Compare the clipped sum of a batch with the sums of the batch without each unit.

    Nothing is released: no noise is drawn, nothing is counted and no parameter changes. Steps that
    were begun are dropped. The check is exact, so its false-alarm rate is 0 up to rounding.

    Args:
        step: of your training loop, from `zero_grad()` to `optimizer.step()`, on one batch.
            Random layers must be off (dropout of 0, or the modules in eval mode).
        optimizer: as `make_private` returned it; flat clipping, or per-layer.
        batch: tensors in any containers, the units in their first dimension. With several ranks,
            each its own; all ranks call this together, with equally many units.
        units: numbers of those to leave out on this rank; by default all.
        tolerance: relative rounding that is allowed.

    Returns:
        A report with one check; `scores` holds the changes in units of C, `[ranks * len(units)]`.

    Raises:
        ValueError: if no unit is left out, or the sum is zero.
    """
    rows = _rows(batch)
    chosen = list(range(rows) if units is None else units)
    if not chosen or not all(0 <= unit < rows for unit in chosen):
        raise ValueError(f"units must be some of 0..{rows - 1}, got {chosen}")
    limit, several = float(optimizer._privacy.sensitivity), _ranks(optimizer) > 1
    with _nothing_released(optimizer):
        whole = _sum(step, optimizer, batch)
        if all(not bool(total.any()) for total in whole):
            raise ValueError(
                "the clipped sum of the batch is zero: step() must run the whole loop body, with "
                "optimizer.step() at its end"
            )
        again = _sum(step, optimizer, batch)
        noise = _distance(whole, again, several) / limit
        changes = []
        for rank, unit in ((rank, unit) for rank in range(_ranks(optimizer)) for unit in chosen):
            mine = rank == _own_rank(optimizer)  # one unit at a time, on one rank
            less = _sum(step, optimizer, _without(batch, unit, rows) if mine else batch)
            changes.append(_distance(whole, less, several) / limit)
    largest = max(changes)
    repeatable = noise <= tolerance
    worst = chosen[changes.index(largest) % len(chosen)]
    finding = Finding(
        "sensitivity",
        repeatable and largest <= 1.0 + tolerance,
        f"unit {worst} changes the sum by {largest:.4g} C, allowed "
        f"{1.0 + tolerance:g} (above: clipping is missing, factors are another row's, or units "
        "influence each other)"
        if repeatable
        else f"the same batch gave sums {noise:.3g} C apart: the model is random, so nothing can "
        "be said; switch dropout and its like off",
    )
    return AuditReport((finding,), false_alarm=0.0, scores=torch.tensor(changes).numpy())


@contextmanager
def _nothing_released(optimizer: Any) -> Iterator[None]:
    """Within the block steps only accumulate, and draws are not compared with batches."""
    draws, names = optimizer._draws, optimizer._unit_names
    optimizer._draws = optimizer._unit_names = None
    once = getattr(optimizer, "reduce_once", False)
    optimizer.reduce_once = False  # so that a physical batch's sum is there to be read
    try:
        optimizer.reset_accumulation()
        optimizer.zero_grad()
        yield
    finally:
        optimizer._draws, optimizer._unit_names, optimizer.reduce_once = draws, names, once
        optimizer.reset_accumulation()  # what has been noted of units, too
        optimizer.zero_grad()


def _ranks(optimizer: Any) -> int:
    """Number of ranks with different units."""
    return int(optimizer._parallelism.world_size)


def _own_rank(optimizer: Any) -> int:
    return dist.get_rank() if _ranks(optimizer) > 1 else 0


def _sum(step: Callable[[Any], Any], optimizer: Any, batch: Any) -> list[Tensor]:
    """The clipped sum of a batch, one tensor a parameter, scaled as it is for clipping."""
    optimizer.reset_accumulation()
    optimizer.signal_skip_step(True)
    step(batch)
    sums = [p.summed_grad for p in optimizer.params]
    found = [
        torch.zeros_like(p) if total is None else total.detach().clone()
        for p, total in zip(optimizer.params, sums, strict=True)
    ]
    optimizer.reset_accumulation()
    optimizer.zero_grad()
    source = optimizer._privacy.gradient_scales
    if source is not None:
        found = [total * scale for total, scale in zip(found, source(), strict=True)]
    return found


def _distance(one: list[Tensor], other: list[Tensor], several: bool) -> float:
    """L2 distance of two sums, summed over ranks where that is still to be done."""
    total = 0.0
    for a, b in zip(one, other, strict=True):
        change = a.double() - b.double()
        if hasattr(change, "full_tensor"):
            change = change.full_tensor()
        elif several:
            dist.all_reduce(change)
        total += float(change.square().sum())
    return total**0.5


def _rows(batch: Any) -> int:
    sizes: set[int] = set()
    tree_map(lambda x: sizes.add(len(x)) if isinstance(x, Tensor) and x.dim() else None, batch)
    if len(sizes) != 1:
        raise ValueError(f"tensors of the batch must agree in their first dimension, got {sizes}")
    return sizes.pop()


def _without(batch: Any, unit: int, rows: int) -> Any:
    def left(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim():
            return x
        keep = torch.arange(rows, device=x.device) != unit
        return x[keep]

    return tree_map(left, batch)
