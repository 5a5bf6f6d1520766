"""FSDP2: layers that autograd carries past the taps, without records or with them, are exact."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from opacus.core.norms.ledger import NormLedger
from opacus.core.record.record import Use
from tests.helpers import oracle
from tests.helpers.carried import ROWS, STEPS, Case, batch, prefer, wanted
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.sharded import full


def count_taps() -> list[str]:
    """Names of the layers that are tapped from now on, in eager code or in graphs."""
    tapped: list[str] = []
    register = Use.register

    def counting(use: Use, *args: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_code.co_name != "_target":
            tapped.append(use.spec.name)
        register(use, *args, **kwargs)

    Use.register = counting  # type: ignore[method-assign]
    return tapped


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reused": {"reused": True},
    "two views": {},
    "later reused": {},
    "checkpoints": {"checkpoints": True},
    "checkpoints, later reused": {"checkpoints": True},
}
# What the planner does, and layers that are tapped in the last steps of each case: without records
# but those of a block whose layers are used twice.
EAGER = [
    ("store", "plain", 0),
    ("store", "reused", 5),
    ("store", "two views", 0),
    ("store", "later reused", 0),
]
# Only blocks are compiled: what is kept of two other layers is tapped. The sum of the gradients of
# two uses is a gradient, that of two inputs is no input.
COMPILED = [
    ("store", "plain", 0),
    ("keep", "two views", 2),
    ("keep", "later reused", 2 + 4),
    ("store", "checkpoints", 0),
    ("keep", "checkpoints, later reused", 2 + 4),
]


class Found(NamedTuple):
    name: str
    errors: list[float]
    records: list[int]  # layers with records, in each step
    taps: list[int]  # layers that were tapped


def check_all(rank: int, world_size: int, compiled: bool) -> list[Found]:
    """What each case's steps gave."""
    import warnings

    warnings.filterwarnings("ignore")
    found, tapped = [], count_taps()
    for what, name, _ in COMPILED if compiled else EAGER:
        prefer(what)
        progress((what, name))
        case, seen = Case(**CASES[name], compiled=compiled), Found(name, [], [], [])
        case.optimizer.isolation = None  # whose runs would be tapped
        steps = 2 if compiled else STEPS  # compiled blocks cannot be followed
        for step in range(steps + ("later reused" in name)):
            if step == steps:  # layers that have run once until now run twice
                case.double.blocks[1].hidden.uses = case.model.blocks[1].hidden.uses = 2
            tapped.clear()
            views = 2 if step and name == "two views" else 1
            seen.errors.append(case.error(rank, world_size, step, views))
            seen.records.append(len(set(case.records)))
            seen.taps.append(len(set(tapped)))
        if name == "checkpoints":
            seen.errors.append(error_while_another_call_waits(case))
        found.append(seen)
    return found


def error_while_another_call_waits(case: Case) -> float:
    """Of the loss of the earlier of two calls; one of both is refused, and changes nothing."""
    x, y = batch(ROWS, 9)
    both = case.loss(case.module(x), y) + case.loss(case.module(x), y)
    with pytest.raises(RuntimeError, match="several forward passes are in one backward"):
        both.backward()
    del both
    case.optimizer.zero_grad()
    sums, _ = wanted(case.double, x, y)
    loss, later = case.loss(case.module(x), y), case.module(2 * x)
    loss.backward()
    del later
    held = [full(p.grad).double() for p in case.model.parameters() if p.requires_grad]
    return max(oracle.relative_error(f, s) for f, s in zip(held, sums, strict=True))


@pytest.mark.parametrize(
    ("world_size", "compiled"),
    [(1, False), (2, False), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_the_sum_is_the_oracles(world_size: int, compiled: bool) -> None:
    for rank in run_distributed(check_all, world_size, compiled):
        for case, (what, _, taps) in zip(rank, COMPILED if compiled else EAGER, strict=True):
            assert max(case.errors) < 2e-5, case
            assert case.records[0] == case.taps[0] == 12, case  # all layers, to learn from
            assert case.taps[-1] == taps, case
            assert case.records[-1] == (10 if what == "keep" else taps), case


def check_the_rest(rank: int, world_size: int) -> None:
    prefer("store")
    case = Case()
    learnt = [case.error(rank, world_size, step) for step in range(3)]
    assert max(learnt) < 2e-5 and not case.records

    x, y = batch(ROWS, 7)
    progress("a gradient that is differentiated again")
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(case.module(x).sum(), x, create_graph=True)
    x = x.detach()

    progress("an ordinary loss")
    nn.functional.cross_entropy(case.module(x), y, reduction="sum").backward()
    assert all(p.grad is None or not full(p.grad).any() for p in case.model.parameters())
    norms = wanted(case.double, x, y)[1]
    assert oracle.relative_error(case.module.get_norm_sample().double(), norms) < 1e-5
    with pytest.raises(RuntimeError, match="did not make"):
        output = case.module(x)
        output.sum().backward(retain_graph=True)
        case.loss(output, y).backward()
    case.optimizer.zero_grad()

    progress("used outside of its layer, which was not so when that was learnt")
    case.model.blocks[0].hidden.reads = 1
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.b\.weight.*outside their layer"):
        case.error(rank, world_size, 8)
    assert not case.records
    case.model.blocks[0].hidden.reads = 0
    case.error(rank, world_size, 8)  # followed, after a pass unlike the others

    progress("frozen meanwhile")
    layers = [case.model.blocks[0].up.b, case.double.blocks[0].up.b]
    for layer in layers:
        layer.weight.requires_grad_(False)
    for _ in range(3):  # two of them are followed, as of another model
        assert case.error(rank, world_size, 9) < 2e-5
    assert case.records == ["blocks.0.up.b"]  # of its bias
    for layer in layers:
        layer.weight.requires_grad_(True)
    assert case.error(rank, world_size, 10) < 2e-5 and not case.records

    progress("under a budget")
    case.module.held_budget = 0
    assert case.error(rank, world_size, 11) < 2e-5 and case.records
    case.module.held_budget = None
    assert case.error(rank, world_size, 12) < 2e-5 and not case.records


def test_other_rows_than_losses_are_refused() -> None:
    ledger = NormLedger(4)
    with pytest.raises(ValueError, match=r"layer 'up' saw 3 rows in a batch of 4 samples"):
        ledger.take_formed({"up.weight": torch.ones(3, 2)}, {"up.weight": "up"})
    assert not ledger.tapped


def test_what_is_refused_and_what_changes() -> None:
    run_distributed(check_the_rest, 1)
