"""Layers with parameters of their own and several rows a sample run once for each sample."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.oracle import CLIPPING_EPS, norms, per_sample_gradients, trainable

B, W, T, D = 4, 2, 3, 5


class Windows(nn.Module):
    """Of rows ``[B * W, T, D]``, W for each sample; each is compared with the sample's others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.runs = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.runs += 1
        own = rows.view(-1, W, T, D)
        return ((own - own.mean(1, keepdim=True)) * self.scale).reshape(-1, T, D)


class Expert(nn.Module):
    """Of rows ``[N, D]``, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(D, D))
        self.runs = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.runs += 1
        return (rows @ self.matrix).tanh()


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(D, D), Windows()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).view(-1, T, D)
        return (rows + self.own(rows)).view(-1, W * T, D).tanh().flatten(1)


class Routed(nn.Module):
    """Some tokens of each sample, or none, go through the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(D, D), Expert()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = x.sum(-1) > 1
        out = h.clone()
        out[chosen] = self.own(h[chosen])
        return out.flatten(1)


class Conditioned(nn.Module):
    """As many rows a sample as there are samples, and something of each sample beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(D, D), OfBoth()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x[:, :B]).flatten(0, 1)
        out: Tensor = self.own(rows, x.mean(1))
        return out.view(-1, B * D)


class OfBoth(Expert):
    def forward(self, rows: Tensor, conditions: Tensor) -> Tensor:
        self.runs += 1
        own = rows.view(len(conditions), -1, D) * conditions[:, None]
        return (own @ self.matrix).flatten(0, 1)


class Chunks(Expert):
    """Each B rows that follow each other are compared; as many as there are make no difference to it."""

    def forward(self, rows: Tensor, table: Tensor) -> Tensor:
        self.runs += 1
        return torch.cat([c - c.mean(0, keepdim=True) / 2 for c in rows.split(B)]) @ self.matrix


class BesideTable(Conditioned):
    """A table of all samples, with as many rows as there are samples by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Chunks()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x[:, :B]).flatten(0, 1)
        return self.own(rows, rows.new_ones(B, D)).view(-1, B * D)


def private(model: nn.Module, c: float, mode: str) -> tuple[Any, Any, Any]:
    """Model, optimizer and criterion of steps on B samples, without noise."""
    made: Any = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(B, 1)), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=c, poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    return (*made[:2], made[2] if len(made) == 4 else nn.CrossEntropyLoss())


@pytest.mark.parametrize("kind", [Conditioned, BesideTable])
def test_rows_beside_something_of_each_sample_are_refused(kind: type[nn.Module]) -> None:
    """In the rows of one sample, the others' conditions would stand for its rows'.

    Nor can rows run by themselves, and the second attempt knows no more than the first.
    """
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(B, W * T, D), torch.arange(B)
    made, optimizer, criterion = private(model, 1.0, "ghost")
    made.isolation.interval = 10**6
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layer 'own'.*a row for each sample beside others"):
            criterion(made(x), y).backward()
        optimizer.zero_grad()


class Dispatch(Expert):
    """Gives rows in the order of what a router says, as they would go on to other experts."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows)[rows.detach()[:, 0].argsort()]


class InTwoOrders(Expert):
    """What it gives first is in the order of its rows."""

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(rows)
        return out, out[rows.detach()[:, 0].argsort()]


class Dispatched(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        given = self.own(rows)
        back = rows[:, 0].argsort().argsort()
        out = given[back] if isinstance(given, Tensor) else given[0] * given[1][back]
        return out.view(x.shape).mean(1)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("kind", [Dispatch, InTwoOrders])
def test_rows_in_another_order_are_refused(kind: type[nn.Module], mode: str) -> None:
    """The first batch is in order already, so it shows nothing."""
    torch.manual_seed(0)
    model, y = Dispatched(kind()), torch.arange(B)
    ordered = torch.linspace(-1, 1, B * W)[:, None].expand(-1, D).contiguous().view(B, W, D)
    made, optimizer, criterion = private(model, 1.0, mode)
    criterion(made(ordered), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"layer 'own'.*gives rows in another order"):
        made(ordered.flip(0))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("kind", [Windowed, Routed])
def test_against_one_sample_at_a_time(kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model: Any = kind().double()
    x = torch.randn(B, W * T, D, dtype=torch.float64)
    x[1] = -1.0  # of this sample nothing is routed
    y = torch.arange(B)
    rows = per_sample_gradients(model, lambda m, one: loss_of(m(one[0]), one[1]), (x, y))
    lengths = norms(rows)
    c = float(lengths.min()) / 2
    made, optimizer, criterion = private(model, c, mode)
    made.isolation.interval = 10**6
    for _ in range(3):
        model.own.runs = 0
        optimizer.zero_grad()
        criterion(made(x), y).backward()
        optimizer.step()
    factors = c / (lengths + CLIPPING_EPS)
    for part, parameter in zip(*trainable(model), strict=True):
        expected = torch.einsum("b,b...->...", factors, rows[part]) / B
        assert float((parameter.grad - expected).abs().max()) < 1e-9 * c, part
    # Its own forward pass, one that vmap begins, and at most one a sample for each backward.
    assert model.own.runs <= 2 * (2 + B)


class TiedWindowed(Routed):
    """The expert's matrix is that of a linear layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.own.matrix = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = self.own(self.first(x).view(-1, T, D))
        return rows.view(-1, W * T, D).flatten(1)


class TiedRouted(Routed):
    """It is that of another expert, too, which gets the other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Expert()
        self.other.matrix = self.own.matrix

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = x.sum(-1) > 1
        out = h.clone()
        out[chosen], out[~chosen] = self.own(h[chosen]), 2 * self.other(h[~chosen])
        return out.flatten(1)


class Counting(Expert):
    """What it does depends on how often it ran, and on what it noted last."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.noted, self.all = 0, None, []

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        scale = self.calls if self.noted is None else self.noted
        self.noted = 1 / (1 + scale)
        self.all.append(rows.shape)
        return super().forward(rows) * scale / len(self.all)


class Counted(Windowed):
    def __init__(self) -> None:
        super().__init__()
        self.own = Counting()


def assert_right(model: Any, made: Any, alone: Any, x: Tensor, c: float) -> None:
    """One step, against one sample at a time; samples whose norm is not finite add nothing."""
    y, sums = torch.arange(len(x)), {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    before = copy.deepcopy(alone)
    for i in range(len(x)):
        one = per_sample_gradients(
            before, lambda m, one: loss_of(m(one[0]), one[1]), (x[i : i + 1], y[i : i + 1])
        )
        norm = float(norms(one))
        for name, grad in one.items() if math.isfinite(norm) else ():
            sums[name] += grad[0] * min(1.0, c / (norm + CLIPPING_EPS)) / B
    alone(x)  # what it counts
    _, optimizer, criterion = made
    optimizer.zero_grad()
    criterion(made[0](x), y).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - sums[name]).abs().max()) < 1e-9 * c, name


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("kind", [Windowed, Routed, TiedWindowed, TiedRouted, Counted])
def test_other_batches_and_samples_that_are_not_finite(kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model: Any = kind().double()
    alone, made = copy.deepcopy(model), private(model, 0.01, mode)
    for rows, wrong in [(B, None), (B, 1), (3, 0), (B, None), (1, None), (2, 1)]:
        x = torch.randn(rows, W * T, D, dtype=torch.float64)
        if wrong is not None:
            x[wrong, 0] = math.nan
        assert_right(model, made, alone, x, 0.01)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_no_rows_of_any_sample(mode: str) -> None:
    torch.manual_seed(0)
    model: Any = Routed().double()
    alone, made = copy.deepcopy(model), private(model, 0.01, mode)
    for rows in (B, 1, 2, B):
        x = torch.full((rows, W * T, D), -1.0, dtype=torch.float64)
        assert_right(model, made, alone, x, 0.01)


def test_a_table_beside_the_rows_of_one_sample_is_not_taken_for_theirs() -> None:
    """It has as many rows as that one sample, which is given all of it."""
    torch.manual_seed(0)
    model, x, y = BesideTable(), torch.randn(B + 1, W * T, D), torch.arange(B + 1) % B
    made, optimizer, criterion = private(model, 1.0, "ghost")
    for some in (slice(1), slice(B + 1)):
        optimizer.zero_grad()
        criterion(made(x[some]), y[some]).backward()
        optimizer.step()
