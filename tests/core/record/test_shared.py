"""Tensors computed once for all samples, in whatever way they meet the samples' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus import PrivacyEngine
from opacus.core.record import shared
from tests.helpers.shared_tables import EXACT, B, D, T, check, products, windows


def other_order(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x.flip(0) + table


def as_weight(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return F.linear(x, table[:D].T @ table)


def changed_in_place_by_another_name(net: Any, x: Tensor, table: Tensor) -> Tensor:
    table.view(-1).mul_(2)
    return x + table


def written_to(net: Any, x: Tensor, table: Tensor) -> Tensor:
    table[:2] = 0.0
    return x + table


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return table.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (table,) = ctx.saved_tensors
        return 2 * table * grads[0]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        return 2 * table

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def in_a_function(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x + Double.apply(table)


def in_a_function_that_saves_it(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x + Square.apply(table)


REFUSED = {
    in_a_function: "'table'.*custom autograd.Function",
    in_a_function_that_saves_it: "custom autograd.Function",
    other_order: "in no order", as_weight: "by linear", written_to: "changed in place",
    changed_in_place_by_another_name: "changed in place.*by another name",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", EXACT)
def test_each_sample_has_a_gradient_of_its_own(use: Any, mode: str) -> None:
    check(use, mode)


@pytest.mark.filterwarnings("ignore:OPACUS_ISOLATION_CHECK")
@pytest.mark.parametrize("use", REFUSED)
def test_what_cannot_be_told_apart_is_refused(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")  # no check is needed for it
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


class First(nn.Module):
    """Gives the later blocks a table that all samples share, as that of T5 does."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(T, D) if table else None
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.table is not None:
            bias = self.table(torch.arange(T))
        assert bias is not None
        return x + torch.tanh(self.layer(x + bias)), bias


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([First(True), First(False), First(False)])
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x, _ = block(x, bias)
        output: Tensor = self.head(x.mean(1))
        return output


def test_a_block_that_gives_a_shared_tensor_is_kept_where_others_are_replayed() -> None:
    found = []
    for budget in (None, 0):
        net = Blocks()
        module, optimizer, criterion, _ = PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(torch.zeros(8, 4), batch_size=B),
            noise_multiplier=0.0,
            max_grad_norm=0.05,
            poisson_sampling=False,
            grad_sample_mode="ghost_bk",
        )
        module.held_budget = budget
        x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            optimizer.zero_grad()
            criterion(module(x), torch.arange(B)).backward()
            optimizer.step()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    torch.testing.assert_close(found[1], found[0])
