"""Plain linear layers that are one node of the graph: exact, and only where nobody looks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import opacus.core.ranks.carried_layers
import opacus.core.record.own_calls
from tests.helpers.carried import Case
from tests.helpers.direct_calls import (
    check_another_weight_runs,
    check_autocast,
    check_what_passes_the_layer_by,
    exact,
    learnt,
    store_all,
)
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
    store_all(monkeypatch)
    monkeypatch.setattr(opacus.core.ranks.carried_layers, "OWN_WEIGHT_TOKENS", 10**9)
    found: list[str] = []
    run = opacus.core.record.own_calls._linear

    def noting(x: Tensor, weight: Tensor, bias: Any, spec: Any, *rest: Any) -> Any:
        found.append(spec.name)
        return run(x, weight, bias, spec, *rest)

    monkeypatch.setattr(opacus.core.record.own_calls, "_linear", noting)
    return found


def settled(case: Case, called: list[str]) -> int:
    """:func:`exact`, once a pass that takes another course than those before has been followed."""
    for seed in range(2):
        exact(case, called, seed)
    return exact(case, called)


def test_fewer_samples_several_uses_and_views(called: list[str]) -> None:
    case = learnt(called, ALL)
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
    case = learnt(called, ALL)
    with how(case.model.blocks[0].up.a):
        assert settled(case, called) == left
    assert settled(case, called) == ALL


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_a_frozen_layer_runs_as_ever(called: list[str], what: str) -> None:
    case = learnt(called, ALL)
    frozen = [getattr(net.blocks[0].up.b, what) for net in (case.model, case.double)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    assert settled(case, called) == ALL - 1
    for parameter in frozen:
        parameter.requires_grad_(True)
    assert settled(case, called) == ALL


@pytest.mark.parametrize("inside", [False, True])
def test_under_autocast_layers_run_as_ever(called: list[str], inside: bool) -> None:
    case = learnt(called, ALL)
    check_autocast(case, called, inside)
    assert len(called) == (6 if inside else 0)


def test_another_weight_in_its_place_is_the_one_that_runs(called: list[str]) -> None:
    check_another_weight_runs(learnt(called, ALL))


def test_what_passes_the_layer_by_is_noticed(called: list[str]) -> None:
    case = learnt(called, ALL)
    check_what_passes_the_layer_by(case)
    assert settled(case, called) == ALL


def test_an_output_may_be_changed_in_place(called: list[str]) -> None:
    case = learnt(called, ALL)
    for net in (case.model, case.double):
        down = net.blocks[1].down
        # Without and with a bias.
        down.forward = lambda x, down=down: down.b(down.a(x).mul_(2)).add_(down.base(x))
    assert settled(case, called) == ALL
