"""Adapters whose weight each sample has for itself: exact, and only where nobody else looks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opacus.core.ranks.carried
import opacus.core.ranks.carried_layers
from opacus.core.record.own_weights import Owned, own_weights, views_to_own
from tests.helpers import direct_calls
from tests.helpers.carried import ROWS, STEPS, Case, Net, batch
from tests.helpers.direct_calls import (
    check_another_weight_runs,
    check_autocast,
    check_what_passes_the_layer_by,
    exact,
    store_all,
)
from tests.helpers.lone_sample import private
from tests.helpers.oracle import relative_error
from tests.helpers.watched_calls import all_hooked, hooked, replaced, saved_elsewhere, watched

ALL = 4  # the low-rank layers without a bias


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that have run so, in the latest step."""
    store_all(monkeypatch)
    found: list[nn.Module] = []

    def noting(layers: Owned, cast: torch.dtype | None) -> None:
        found.extend(module for module, _ in layers)
        own_weights(layers, cast)

    monkeypatch.setattr(opacus.core.ranks.carried, "own_weights", noting)
    return found


def learnt(owned: list[nn.Module], **how: Any) -> Case:
    case = direct_calls.learnt(owned, ALL, **how)
    assert not case.records
    return case


def test_uses_batches_and_copies(owned: list[nn.Module]) -> None:
    case = learnt(owned)
    assert exact(case, owned, rows=2) == ALL  # fewer samples
    case.double.blocks[1].hidden.uses = case.model.blocks[1].hidden.uses = 2
    assert exact(case, owned) == ALL and "blocks.1.up.a" not in case.records
    assert exact(case, owned, views=2) > 0


@pytest.mark.parametrize(
    ("how", "left"),
    [(hooked, 3), (watched, 3), (replaced, 3), (all_hooked, 0), (saved_elsewhere, 0)],
)
def test_who_looks_on_sees_the_call(
    owned: list[nn.Module], how: Callable[[Any], Any], left: int
) -> None:
    case = learnt(owned)
    with how(case.model.blocks[0].up.a):
        for _ in range(2 if how is replaced else 0):
            assert exact(case, owned) == 0  # followed
        assert exact(case, owned) == left
    assert exact(case, owned) == ALL


def test_a_layer_that_is_frozen_or_called_otherwise(owned: list[nn.Module]) -> None:
    case = learnt(owned)
    layers = [case.model.blocks[0].up.a, case.double.blocks[0].up.a]
    for layer in layers:
        layer.weight.requires_grad_(False)
    assert [exact(case, owned) for _ in range(2)] == [0, 0]  # followed, as of another model
    assert exact(case, owned) == ALL - 1
    for layer in layers:
        layer.weight.requires_grad_(True)
    up, forward = case.model.blocks[0].up, case.model.blocks[0].up.forward
    up.forward = lambda x: forward(x.unsqueeze(2)).squeeze(2)  # other dimensions
    counts = [exact(case, owned) for _ in range(2)]
    assert counts == [0, 0]  # followed
    assert exact(case, owned) == ALL and "blocks.0.up.a" in case.records
    del up.forward
    assert exact(case, owned) == ALL and not case.records


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_rounds_as_it_does_without_privacy(owned: list[nn.Module], inside: bool) -> None:
    """Around the model, or within a block only: then what has another type has a record."""
    case = learnt(owned)
    check_autocast(case, owned, inside)
    assert len(owned) == ALL and set(case.records) == ({"blocks.0.down.a"} if inside else set())


def test_another_weight_in_its_place_is_the_one_that_runs(owned: list[nn.Module]) -> None:
    check_another_weight_runs(learnt(owned))


def test_what_passes_the_layer_by_is_noticed(owned: list[nn.Module]) -> None:
    case = learnt(owned)
    check_what_passes_the_layer_by(case)
    assert exact(case, owned) == ALL


class Quantised(Tensor):
    """A weight that may have a product of its own."""


def test_a_weight_of_another_type_is_left_alone(owned: list[nn.Module]) -> None:
    layer = learnt(owned).model.blocks[0].up.a
    plain = layer.weight
    with torch.no_grad():
        views = views_to_own(layer, ROWS)
        assert views is not None and views.shape == (ROWS, 8, 2)
        layer._parameters["weight"] = plain.detach().as_subclass(Quantised).requires_grad_()
        assert views_to_own(layer, ROWS) is None


@pytest.mark.gpu
def test_on_a_gpu_sums_are_those_of_records(owned: list[nn.Module]) -> None:
    sums: dict[int, list[Tensor]] = {}
    for tokens in (1, 10**9):  # from where on a layer has weights of its own
        opacus.core.ranks.carried_layers.OWN_WEIGHT_TOKENS = tokens
        torch.manual_seed(5)
        net = Net().cuda()
        held = [p for p in net.parameters() if p.requires_grad]
        module, optimizer, loss = private(net, rows=batch(8, 0))
        for step in range(STEPS):
            x, y = (t.cuda() for t in batch(ROWS, step))
            owned.clear()
            loss(module(x), y).backward()
            sums[tokens] = [p.grad.clone() for p in held if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        assert len(owned) == (ALL if tokens == 1 else 0)
    for found, want in zip(sums[1], sums[10**9], strict=True):
        assert want.any() and relative_error(found, want) < 1e-5
