"""FSDP2: layers whose stored gradients autograd carries, without records, give the oracle's sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opacus.core.norms.ledger import NormLedger
from tests.helpers import oracle
from tests.helpers.carried import ROWS, STEPS, Case, batch, store_all, wanted
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.sharded import full


def check_all(
    rank: int, world_size: int, compiled: bool
) -> list[tuple[str, list[float], list[int]]]:
    """Errors and numbers of layers with records, of each case's steps."""
    import warnings

    warnings.filterwarnings("ignore")
    store_all()
    found = []
    eager: dict[str, dict[str, Any]] = {"plain": {}, "reused": {"reused": True}, "two views": {}}
    cases = {"compiled": {"compiled": True}} if compiled else eager
    for name, how in cases.items():
        progress(name)
        case, errors, records = Case(**how), [], []
        views = 2 if name == "two views" else 1
        for step in range(2 if compiled else STEPS):  # compiled blocks cannot be followed
            errors.append(case.error(rank, world_size, step, views if step else 1))
            records.append(len(set(case.records)))
        found.append((name, errors, records))
    return found


@pytest.mark.parametrize(
    ("world_size", "compiled"),
    [(1, False), (2, False), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_the_sum_is_the_oracles(world_size: int, compiled: bool) -> None:
    for rank in run_distributed(check_all, world_size, compiled, timeout=120):
        for name, errors, records in rank:
            assert max(errors) < 2e-5, (name, errors)
            assert records[0] == 10, (name, records)  # all layers, to learn from
            least = 4 if name == "reused" else 0
            assert min(records) == least, (name, records)


def check_the_rest(rank: int, world_size: int) -> None:
    store_all()
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
    case.model.blocks[0].reads = True
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.b\.weight.*outside their layer"):
        case.error(rank, world_size, 8)
    assert not case.records
    case.model.blocks[0].reads = False

    progress("frozen meanwhile")
    layers = [case.model.blocks[0].up.b, case.double.blocks[0].up.b]
    for layer in layers:
        layer.weight.requires_grad_(False)
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
