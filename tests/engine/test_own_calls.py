"""Plain linear layers that are one node of the graph: exact, and only where nobody looks on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

import opacus.core.ranks.carried
import opacus.core.record.own_calls
from tests.helpers.carried import ROWS, STEPS, Case, batch, prefer, wanted
from tests.helpers.lone_sample import no_gradient
from tests.helpers.oracle import relative_error
from tests.helpers.watched_calls import (
    all_hooked,
    all_replaced,
    hooked,
    replaced,
    saved_elsewhere,
    watched,
)

ALL = 10  # linear layers


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers that have run so, in the latest step."""
    for module, name in [
        (opacus.core.sums.choice, "KEEP_PASSES"),
        (opacus.core.sums.choice, "STORE_PASSES"),
        (opacus.core.ranks.carried, "OWN_WEIGHT_TOKENS"),
    ]:
        monkeypatch.setattr(module, name, getattr(module, name))  # as it was, afterwards
    prefer("store")
    monkeypatch.setattr(opacus.core.ranks.carried, "OWN_WEIGHT_TOKENS", 10**9)
    found: list[str] = []
    run = opacus.core.record.own_calls._linear

    def noting(x: Tensor, weight: Tensor, bias: Any, spec: Any, *rest: Any) -> Any:
        found.append(spec.name)
        return run(x, weight, bias, spec, *rest)

    monkeypatch.setattr(opacus.core.record.own_calls, "_linear", noting)
    return found


def learnt(called: list[str], **how: Any) -> Case:
    case = Case(mode="ghost_bk", **how)
    for step in range(STEPS):
        called.clear()
        assert case.error(0, 1, step) < 2e-5
    assert len(called) == len(set(called)) == ALL
    return case


def exact(case: Case, called: list[str], seed: int = 9, **how: Any) -> int:
    """A step is exact; how many layers were one node."""
    called.clear()
    assert case.error(0, 1, seed, **how) < 2e-5
    assert not any("_compiled_call_impl" in vars(m) for m in case.model.modules())
    return len(called)


def settled(case: Case, called: list[str]) -> int:
    """:func:`exact`, once a pass that takes another course than those before has been followed."""
    for seed in range(2):
        exact(case, called, seed)
    return exact(case, called)


def test_fewer_samples_several_uses_and_views(called: list[str]) -> None:
    case = learnt(called)
    assert exact(case, called, rows=2) == ALL
    case.double.blocks[1].hidden.uses = case.model.blocks[1].hidden.uses = 2
    assert exact(case, called) > 0
    assert exact(case, called, views=2) > 0


@pytest.mark.parametrize(
    ("how", "left"),
    [
        *((one, ALL - 1) for one in (hooked, watched, replaced)),
        *((every, 0) for every in (all_hooked, all_replaced, saved_elsewhere)),
    ],
)
def test_who_looks_on_sees_the_call(
    called: list[str], how: Callable[[Any], Any], left: int
) -> None:
    case = learnt(called)
    with how(case.model.blocks[0].up.a):
        assert settled(case, called) == left
    assert settled(case, called) == ALL


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_a_frozen_layer_runs_as_ever(called: list[str], what: str) -> None:
    case = learnt(called)
    frozen = [getattr(net.blocks[0].up.b, what) for net in (case.model, case.double)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    assert settled(case, called) == ALL - 1
    for parameter in frozen:
        parameter.requires_grad_(True)
    assert settled(case, called) == ALL


@pytest.mark.parametrize("inside", [False, True])
def test_under_autocast_layers_run_as_ever(called: list[str], inside: bool) -> None:
    case = learnt(called)
    x, y = batch(ROWS, 5)
    cast = torch.autocast("cpu", torch.bfloat16)
    sums, norms = wanted(case.double, x, y)
    if inside:
        case.model.blocks[0].forward = cast(case.model.blocks[0].forward)
        for _ in range(2):
            case.module(x)  # followed
    called.clear()
    with contextlib.nullcontext() if inside else cast:
        output = case.module(x)
    case.loss(output.float(), y).backward()
    assert len(called) == (6 if inside else 0)
    assert 1e-5 < relative_error(case.module.per_sample_gradient_norms.double(), norms) < 0.02
    held = [p for p in case.model.parameters() if p.requires_grad]
    for parameter, total in zip(held, sums, strict=True):
        assert relative_error(parameter.grad.double(), total) < 0.05


def test_another_weight_in_its_place_is_the_one_that_runs(called: list[str]) -> None:
    case = learnt(called)
    block, other = case.model.blocks[0], torch.randn(2, 8)
    forward = block.forward

    def swapped(x: Tensor) -> Any:
        with _reparametrize_module(block, {"up.a.weight": other}):
            return forward(x)

    x = batch(ROWS, 3)[0]
    block.forward = swapped
    found = case.module(x)
    del block.forward
    case.model.eval()
    with torch.no_grad():
        block.up.a.weight.copy_(other)
    torch.testing.assert_close(found, case.model(x))


def test_what_passes_the_layer_by_is_noticed(called: list[str]) -> None:
    case = learnt(called)
    x, y = batch(ROWS, 5)
    block, forward = case.model.blocks[0], case.model.blocks[0].forward
    block.forward = lambda t: forward(t) + block.up.a.weight.sum()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.a\.weight"):
        case.loss(case.module(x), y).backward()
    assert no_gradient(case.model)
    del block.forward
    block.up.a.eval()  # alone
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.a\.weight"):
        case.loss(case.module(x), y).backward()
    block.up.a.train()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        case.module(x).sum().backward(create_graph=True)
    assert settled(case, called) == ALL


def test_an_output_may_be_changed_in_place(called: list[str]) -> None:
    case = learnt(called)
    for net in (case.model, case.double):
        down = net.blocks[1].down
        # Without and with a bias.
        down.forward = lambda x, down=down: down.b(down.a(x).mul_(2)).add_(down.base(x))
    assert settled(case, called) == ALL
