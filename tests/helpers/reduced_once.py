"""Physical batches of a logical one, whose clipped sums ranks add up once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers import replayed_blocks as one
from tests.helpers.distributed import progress

# Rows of each rank in the three physical batches of a logical one.
PARTS = {2: (((0, 1), (2,), ()), ((3,), (), (4,))), 4: (((0,), (), (1,)), ((2,),), ((), (3,)), ())}

MODES = ("ghost_fsdp_bk", "ghost_fsdp")
# Mode, and bytes that may be held in it.
WAYS = (("ghost_fsdp_bk", None), ("ghost_fsdp_bk", 0), ("ghost_fsdp", None))


def physical(made: Any, rows: Any, more: bool) -> None:
    model, optimizer, criterion = made[:3]
    x, y = one.batch()
    optimizer.signal_skip_step(more)
    criterion(model(x[list(rows)]), y[list(rows)]).backward()


def logical(made: Any, parts: Any) -> dict[str, Tensor]:
    optimizer = made[1]
    for place in range(3):
        physical(made, parts[place] if place < len(parts) else (), place < 2)
        optimizer.step()
        found = {n.removeprefix("_module."): p.grad for n, p in made[0].named_parameters()}
        optimizer.zero_grad(set_to_none=True)
    return {name: one.full(grad).clone() for name, grad in found.items()}


def build(clip: float, mode: str, noise: float = 0.0, held: int | None = None) -> Any:
    made = one.private(FSDP2Wrapper(one.build()), clip, mode)
    made[1].noise_multiplier = noise
    if mode.endswith("_bk"):
        made[0].held_budget = held
    return made


def job(rank: int, world: int, clip: float) -> dict[str, Any]:
    parts, results = PARTS[world][rank], {}
    for mode, held in WAYS:
        progress((mode, held))
        made = build(clip, mode, held=held)
        sink = made[0]._strategy.sink
        logical(made, parts)  # on a GPU sums wait from the second step on, whose peak is known
        begun = sink.reductions
        logical(made, parts)
        once = sink.reductions - begun
        results[f"{mode}, held {held}"] = logical(made, parts)
        assert sink.reductions == begun + 2 * once
        made[1].reduce_once = False
        results[f"{mode}, each, held {held}"] = logical(made, parts)
        results[f"{mode} counts"] = (once, sink.reductions - begun - 2 * once)
    for mode in MODES:
        torch.manual_seed(7)
        for once in (True, False):
            progress((mode, once))
            made = build(clip, mode, noise=2.0)
            made[1].reduce_once = once
            made[1]._parallelism.key.adopt(b"k" * 32)
            results[f"{mode}, noise {once}"] = logical(made, parts)
        results[f"{mode}, dropped"] = dropped(made, parts)
    return results


def dropped(made: Any, parts: Any) -> dict[str, Any]:
    """A batch is dropped after its backward pass; then the whole logical batch is given up."""
    optimizer, unreduced = made[1], made[0]._strategy.unreduced
    optimizer.noise_multiplier, optimizer.reduce_once = 0.0, True
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("opacus.core.sums.unreduced").addHandler(handler)
    try:
        physical(made, parts[0] if parts else (), True)
        assert unreduced and unreduced.fresh and not messages
        assert all(p.grad is None for p in made[0].parameters())
        optimizer.zero_grad()
        assert not unreduced and len(messages) == 1
        optimizer._step_skip_queue.clear()
    finally:
        logging.getLogger("opacus.core.sums.unreduced").removeHandler(handler)
    with pytest.raises(RuntimeError, match="no clipped gradient"):
        optimizer.step()
    after = logical(made, parts)
    physical(made, parts[0] if parts else (), True)
    optimizer.step()
    assert unreduced and not unreduced.fresh
    optimizer.reset_accumulation()
    assert not unreduced
    return {"after": after, "given up": logical(made, parts)}


def check(found: list[dict[str, Any]], world: int) -> None:
    """What every rank of :func:`job` must have found."""
    want = expected(world)[1]
    for results in found:
        for mode, held in WAYS:
            one.close(results[f"{mode}, held {held}"], want)
            one.close(results[f"{mode}, each, held {held}"], want)
        for mode in MODES:
            one.close(results[f"{mode}, dropped"]["after"], want)
            one.close(results[f"{mode}, dropped"]["given up"], want)
            once, each = results[f"{mode} counts"]
            # In two passes FSDP2 itself reduces each.
            assert once > 0 and each == (3 * once if mode.endswith("_bk") else 0)
            one.close(results[f"{mode}, noise True"], results[f"{mode}, noise False"])
            assert any(
                oracle.relative_error(grad, want[name]) > 0.1
                for name, grad in results[f"{mode}, noise True"].items()
            )


def expected(world: int) -> tuple[float, dict[str, Tensor]]:
    """A clipping norm that some gradients exceed, and the clipped sum of all rows."""
    grads = oracle.per_sample_gradients(one.build(), one.loss_of, one.batch())
    rows = [row for rank in PARTS[world] for part in rank for row in part]
    assert len(rows) == len(set(rows))
    chosen = {name: grad[rows] for name, grad in grads.items()}
    norms = oracle.norms(chosen)
    clip = float(norms.median()) * 1.001
    assert (norms > 1.1 * clip).any() and (norms < clip).any()
    return clip, oracle.clipped_sum(chosen, clip)
