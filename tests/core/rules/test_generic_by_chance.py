"""A tensor that all samples share, given to a layer without a rule, with as many rows as samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus import IsolationError
from tests.helpers import oracle
from tests.helpers.releases import CLIP, private


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (x + positions) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scaled, self.head = Scaled(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, ::2] + x[:, 1::2]  # so that no input has this length
        positions = torch.arange(x.shape[1] * 6.0, dtype=x.dtype).view(-1, 6).sin()
        output: Tensor = self.head(torch.tanh(self.scaled(x, positions)).mean(1))
        return output


class Either(nn.Module):
    """Takes a table that all samples share, or a mask of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, table: Any = None, mask: Any = None) -> Tensor:
        if table is None:
            return x * mask * self.scale
        return torch.softmax(x @ table.t(), -1) @ table * self.scale


class ByName(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Either()

    def forward(self, x: Tensor) -> Tensor:
        x, table = x.mean(1), torch.arange(30.0, dtype=x.dtype).view(5, 6).sin()
        output: Tensor = self.head(self.scaled(x, table=table) + self.scaled(x, mask=x.sigmoid()))
        return output


def loss_of(model: Any, one: Any) -> Tensor:
    return nn.functional.cross_entropy(model(one[0]), one[1])


def exact(made: Any, net: Net, rows: int, length: int) -> None:
    x, y = torch.randn(rows, 2 * length, 6).double() * 3, torch.arange(rows) % 3
    grads = oracle.per_sample_gradients(type(net)().double(), loss_of, (x, y))
    made[1].zero_grad()
    made[2](made[0](x), y).backward()
    made[1].step()
    for name, want in oracle.clipped_sum(grads, CLIP).items():
        got = net.get_parameter(name).grad
        assert got is not None
        assert oracle.relative_error(got, want) < 1e-9, (rows, name)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_later(mode: str) -> None:
    net = Net().double()
    made = private(net, mode)
    for rows, length in ((8, 6), (7, 6), (6, 6), (4, 4), (5, 6), (1, 6), (6, 6)):
        exact(made, net, rows, length)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("rows", [6, 12])
def test_in_the_first_step_it_is_refused_once(rows: int, mode: str) -> None:
    net = Net().double()
    made = private(net, mode)
    with pytest.raises(IsolationError):
        exact(made, net, rows, rows)
    made[1].zero_grad()
    for count in (rows - 1, rows, rows):
        exact(made, net, count, rows)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_arguments_are_told_apart_by_name(mode: str) -> None:
    net = ByName().double()
    made = private(net, mode)
    for rows in (6, 4, 6):
        exact(made, net, rows, 6)
