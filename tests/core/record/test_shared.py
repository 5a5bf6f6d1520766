"""Tensors computed once for all samples, in whatever way they meet the samples' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opacus.core.record import shared
from tests.helpers.shared_tables import EXACT, B, D, check, products, windows


def other_order(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x.flip(0) + table


def as_weight(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return F.linear(x, table[:D].T @ table)


def changed_in_place(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x + table.mul_(2)


def written_to(net: Any, x: Tensor, table: Tensor) -> Tensor:
    table[:2] = 0.0
    return x + table


REFUSED = {
    other_order: "in no order", as_weight: "by linear", changed_in_place: "changed in place",
    written_to: "changed in place",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", EXACT)
def test_each_sample_has_a_gradient_of_its_own(use: Any, mode: str) -> None:
    check(use, mode)


@pytest.mark.parametrize("use", REFUSED)
def test_what_cannot_be_told_apart_is_refused(use: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[use]):
        check(use, "ghost")
    assert torch.overrides._len_torch_function_stack() == 0


def test_the_trail_finds_rows_of_the_wrong_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    along = shared._along
    monkeypatch.setattr(shared, "_along", lambda *args: along(*args).roll(1, 0))
    with pytest.raises(ValueError, match="of no single sample"):
        check(windows, "ghost")


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("inside", ["use", "lookup and use", "two blocks"])
@pytest.mark.parametrize("use", EXACT)
def test_checkpoints_find_what_shared_tensors_met(use: Any, inside: str, mode: str) -> None:
    check(use, mode, inside)


def both_ways(net: Any, x: Tensor, table: Tensor) -> Tensor:
    """Two tensors ``[B, B, D]``, with samples along one dimension and along the other."""
    x, table = x[:, :B], table[:B]
    return x * table + (x.transpose(0, 1) * table.unsqueeze(1)).transpose(0, 1)


def test_one_shape_with_samples_in_different_places_is_refused_in_checkpoints() -> None:
    check(both_ways, "ghost")
    with pytest.raises(RuntimeError, match="after the forward pass"):
        check(both_ways, "ghost", "use")


def test_selective_checkpoints_are_refused() -> None:
    with pytest.raises(RuntimeError, match="after the forward pass"):
        check(products, "ghost_bk", "selective")


@pytest.mark.parametrize("use", EXACT)
def test_reentrant_checkpoints_of_shared_tensors_are_refused(use: Any) -> None:
    """Gradients go through what they compute again, where whose rows it meets is not known."""
    with pytest.raises((ValueError, RuntimeError)):
        check(use, "ghost_bk", "reentrant")


@pytest.mark.parametrize("inside", ["", "use", "lookup and use", "two blocks"])
def test_another_use_of_the_layer_is_the_samples_own(inside: str) -> None:
    def own(net: Any, x: Tensor, table: Tensor) -> Tensor:
        return x * table + net.table((x.detach()[:, :2, 0] > 0).long()).sum(1, keepdim=True)

    check(own, "ghost_bk", inside)
