"""Tensors computed once for all samples, in whatever way they meet the samples' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.record import shared
from tests.helpers.oracle import clipped_sum, norms, per_sample_gradients

B, T, D = 3, 4, 6
LOSS = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Tokens ``[B, T, D]`` and a table ``[T, D]``, combined as a test says."""

    def __init__(self, use: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.table = nn.Linear(2, D), nn.Embedding(T, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.use(self, self.patch(x), table)).mean(1))


def windows(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return (x.view(-1, T // 2, D) + table[: T // 2]).view(x.shape)


def windows_that_differ(net: Any, x: Tensor, table: Tensor) -> Tensor:
    by_window = table.view(2, T // 2, D).repeat(len(x), 1, 1)  # [B * 2, T / 2, D]
    return (x.view(-1, T // 2, D) * by_window).view(x.shape)


def masked_windows(net: Any, x: Tensor, table: Tensor) -> Tensor:
    mask = torch.linspace(0, 1, 2).repeat(len(x)).view(-1, 1, 1)  # nobody's, of all windows
    return (x.view(-1, T // 2, D) + (table[: T // 2] + mask)).view(x.shape)


def time_first(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return (x.transpose(0, 1) + table.unsqueeze(1)).transpose(0, 1)


def parts(net: Any, x: Tensor, table: Tensor) -> Tensor:
    first, second = table.chunk(2, -1)
    return x + torch.cat([second.exp(), first], -1)


def prompt(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([table[None].repeat(len(x), 1, 1).to(x), x], 1)


def expanded_prompt(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([x, table[None].expand(len(x), -1, -1)], 1)


def products(net: Any, x: Tensor, table: Tensor) -> Tensor:
    keys = table[None].repeat(len(x), 1, 1)
    return torch.bmm(torch.bmm(x, keys.transpose(-1, -2)).softmax(-1), keys) + x @ (table.T @ table)


def layers(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x + net.norm(table) + net.norm(x)  # both uses of one layer count


def added_in_place(net: Any, x: Tensor, table: Tensor) -> Tensor:
    x = x * 1.0
    x += table
    return x


def twice(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return (x + table) * table


EXACT = [
    windows, windows_that_differ, masked_windows, time_first, parts, prompt, expanded_prompt,
    products, layers, added_in_place, twice,
]  # fmt: skip


def other_order(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x.flip(0) + table


def as_weight(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return F.linear(x, table[:D].T @ table)


def changed_in_place(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x + table.mul_(2)


def written_to(net: Any, x: Tensor, table: Tensor) -> Tensor:
    table[:2] = 0.0
    return x + table


def computed_again(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return checkpoint(lambda own: own + table, x, use_reentrant=False)


REFUSED = {
    other_order: "in no order", as_weight: "by linear", changed_in_place: "changed in place",
    written_to: "changed in place", computed_again: "after the forward pass",
}  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(B, T, 2, generator=draw).double(), torch.arange(B)


def check(use: Any, mode: str) -> None:
    x, y = batch()
    rows = per_sample_gradients(Net(use), lambda m, one: LOSS(m(one[0]), one[1]), (x, y))
    c = float(norms(rows).min()) / 2
    model = Net(use).double()
    made: Any = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=c,
        data_loader=DataLoader(TensorDataset(x), batch_size=B), poisson_sampling=False,
        grad_sample_mode=mode,
    )  # fmt: skip
    loss = made[2] if len(made) == 4 else LOSS
    for _ in range(2):
        made[1].zero_grad()
        loss(made[0](x), y).backward()
        made[1].step()
        for name, total in clipped_sum(rows, c).items():
            got = model.get_parameter(name).grad
            torch.testing.assert_close(0.0 * total if got is None else got, total / B)


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
