"""One process: layers whose stored gradients autograd carries have no records; sums stay exact."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import opacus.core.ranks.carried_layers
import opacus.core.sums.choice
from tests.helpers import oracle
from tests.helpers.carried import ROWS, STEPS, Case, batch, wanted
from tests.helpers.graphs import fresh_graphs
from tests.helpers.lone_sample import C, no_gradient

ONE = functools.partial(Case, mode="ghost_bk")


@pytest.fixture(autouse=True)
def _store_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opacus.core.sums.choice, "KEEP_PASSES", 10**9)
    monkeypatch.setattr(opacus.core.ranks.carried_layers, "OWN_WEIGHT_TOKENS", 1)


def learnt(**how: Any) -> Case:
    """After steps with records, the latest one without any."""
    case = ONE(**how)
    for step in range(STEPS):
        assert case.error(0, 1, step) < 2e-5
    assert not case.records
    return case


@pytest.mark.filterwarnings("ignore")  # torch.compile causes them in torch
@pytest.mark.parametrize(
    "name", ["plain", "reused", "two views", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_the_sum_is_the_oracles(name: str) -> None:
    case = ONE(reused=name == "reused", compiled=name == "compiled")
    views = 2 if name == "two views" else 1
    records = []
    for step in range(STEPS):
        assert case.error(0, 1, step, views if step else 1) < 2e-5
        records.append(len(set(case.records)))
    assert records[0] == 12  # all layers, to learn from
    assert min(records) == (5 if name == "reused" else 0)


def test_fewer_samples_need_not_be_learnt_from() -> None:
    case = learnt()
    # A larger batch may need more memory than was there: its first step has records.
    for rows, records in [(2, 0), (7, 12), (7, 0), (6, 0), (ROWS, 0)]:
        assert case.error(0, 1, rows, rows=rows) < 2e-5
        assert len(set(case.records)) == records, rows
        table = case.module.explain().split("\n\n")[0].splitlines()[1:]
        assert len(table) == 12
        assert {line.split()[2] for line in table} == {str(rows)}  # of the step, not of the lesson
        assert all(line.count(f"[{rows}, ") == 2 for line in table)


def test_shorter_inputs_need_not_be_learnt_from() -> None:
    case = learnt()
    # Down to half the length; longer ones may need more memory than was there.
    for tokens, rows, records in [
        (4, ROWS, 0), (4, 2, 0), (2, ROWS, 12), (2, ROWS, 0), (7, ROWS, 12), (6, ROWS, 0),
        (7, 2, 0), (6, 5, 12),
    ]:  # fmt: skip
        assert case.error(0, 1, tokens, rows=rows, tokens=tokens) < 2e-5
        assert len(set(case.records)) == records, (tokens, rows)
    # What is kept of layers has their length.
    known = case.module._recorder.carried._known
    for key, (most, parts) in known.items():
        kept = {
            part: own._replace(layers=[layer._replace(choice=None) for layer in own.layers])
            for part, own in parts.items()
        }
        known[key] = most, kept
    assert case.module._recorder.carried._learnt_of_longer((("samples", 4, 4),)) == (0, {})


def test_a_use_beside_its_layer_is_noticed_also_where_it_is_carried() -> None:
    case = learnt()
    case.model.blocks[0].hidden.reads = 1
    x, y = batch(ROWS, 5)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.b\.weight"):
        case.loss(case.module(x), y).backward()
    assert no_gradient(case.model)
    case.model.blocks[0].hidden.reads = 0
    assert case.error(0, 1, 6) < 2e-5 and case.records  # followed, after a pass unlike the others
    assert case.error(0, 1, 7) < 2e-5 and not case.records


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_is_checkpointed_from_now_on(reentrant: bool) -> None:
    case = learnt()
    block = case.model.blocks[1]
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    for step in range(4, 6):
        assert case.error(0, 1, step) < 2e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["store", "keep"])
def test_compiled_blocks_that_are_checkpointed_from_now_on(what: str, monkeypatch) -> None:
    """Their graphs have carriers, which were not in another one: one step says so."""
    if what == "keep":
        monkeypatch.setattr(opacus.core.sums.choice, "KEEP_PASSES", 2)
        monkeypatch.setattr(opacus.core.sums.choice, "STORE_PASSES", 10**9)
    with fresh_graphs():
        case = ONE(compiled=True)
        assert max(case.error(0, 1, step) for step in range(2)) < 2e-5
        assert len(case.records) == (10 if what == "keep" else 0)
        case.model.checkpoints = True
        x, y = batch(ROWS, 2)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.norm.*was not there in earlier steps"):
            case.loss(case.module(x), y).backward()
        assert no_gradient(case.model)
        for step in range(3, 5):
            assert case.error(0, 1, step) < 2e-5


def test_other_rows_frozen_layers_and_failed_passes() -> None:
    case = learnt()
    layers = [case.model.blocks[0].up.a, case.double.blocks[0].up.a]
    for layer in layers:
        layer.weight.requires_grad_(False)
    assert case.error(0, 1, 4) < 2e-5
    for layer in layers:
        layer.weight.requires_grad_(True)

    def fails(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = case.model.blocks[1].register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        case.module(batch(ROWS, 5)[0])
    handle.remove()
    assert all(type(p) is nn.Parameter for p in case.model.parameters())
    assert case.error(0, 1, 6) < 2e-5 and not case.records
    case.module.held_budget = 0
    assert case.error(0, 1, 7) < 2e-5 and case.records
    case.module.held_budget = None
    with torch.no_grad():
        case.module(batch(ROWS, 5)[0])
    assert case.error(0, 1, 8) < 2e-5 and not case.records


def test_a_layer_that_is_compiled_by_itself_later_stays_compiled() -> None:
    case = learnt()
    layer = next(m for m in case.model.modules() if isinstance(m, nn.Linear) and m.bias is None)
    compiled = layer._compiled_call_impl = functools.partial(layer._call_impl)  # as compile() does
    assert case.error(0, 1, STEPS) < 2e-5
    assert layer._compiled_call_impl is compiled


@pytest.mark.parametrize("what", ["store", "keep"])
def test_a_loss_of_one_call_while_another_waits(what: str, monkeypatch) -> None:
    """Layers are then used twice as far as is known: their records wait, to the end."""
    monkeypatch.setattr(opacus.core.sums.choice, "KEEP_PASSES", 10**9 if what == "store" else 2)
    monkeypatch.setattr(opacus.core.sums.choice, "STORE_PASSES", 3 if what == "store" else 10**9)
    case = ONE()
    x, y = batch(7, 3)
    sums, norms = wanted(case.double, x, y)
    loss = case.loss(case.module(x), y)
    later = case.module(x[:5])
    loss.backward()
    got = case.module.per_sample_gradient_norms.double()
    assert (norms > 2 * C).all() and oracle.relative_error(got, norms) < 1e-5
    held = [p.grad for p in case.model.parameters() if p.requires_grad]
    assert max(oracle.relative_error(g.double(), s) for g, s in zip(held, sums, strict=True)) < 2e-5
    del later
