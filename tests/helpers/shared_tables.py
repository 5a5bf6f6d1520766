"""A table that all samples share, and the ways in which it meets their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.oracle import clipped_sum, norms, per_sample_gradients

B, T, D = 3, 4, 6
LOSS = nn.CrossEntropyLoss()


def keeps_products() -> Any:
    """Of a selective checkpoint: what products give is kept, all else is computed again."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = any(name in str(operation) for name in ("mul", "mm"))
        return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Net(nn.Module):
    """Tokens ``[B, T, D]`` and a table ``[T, D]``, combined as a test says."""

    def __init__(self, use: Callable[[Any, Tensor, Tensor], Tensor], inside: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.table = nn.Linear(2, D), nn.Embedding(T, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)
        self.use, self.inside = use, inside

    def looked_up(self, x: Tensor) -> Tensor:
        return self.table(torch.arange(x.shape[1]))

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A block that makes the table for those that follow, as T5's does."""
        table = self.looked_up(x)
        return torch.tanh(x + self.norm(self.use(self, x, table)).mean(1, keepdim=True)), table

    def body(self, x: Tensor) -> Tensor:
        def again(function: Any, *args: Any) -> Any:
            more = {"context_fn": keeps_products} if self.inside == "selective" else {}
            return checkpoint(function, *args, use_reentrant=self.inside == "reentrant", **more)

        if not self.inside:
            return self.use(self, x, self.looked_up(x))
        if self.inside == "lookup and use":
            return again(lambda own: self.use(self, own, self.looked_up(own)), x)
        if self.inside == "two blocks":
            x, table = again(self.first, x)
        else:
            table = self.looked_up(x)
        return again(lambda own, shared: self.use(self, own, shared), x, table)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.patch(x))).mean(1))


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


def expanded_as_the_samples(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x * table.expand_as(x) + table[None].expand_as(x).transpose(1, 2).transpose(1, 2)


def products(net: Any, x: Tensor, table: Tensor) -> Tensor:
    keys = table[None].repeat(len(x), 1, 1)
    return torch.bmm(torch.bmm(x, keys.transpose(-1, -2)).softmax(-1), keys) + x @ (table.T @ table)


def layers(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return x + net.norm(table) + net.norm(x)  # both uses of one layer count


def added_in_place(net: Any, x: Tensor, table: Tensor) -> Tensor:
    x = x * 1.0
    x += table
    return x


def changed_in_place(net: Any, x: Tensor, table: Tensor) -> Tensor:
    """As DeBERTa's projections of positions are; what was made of it before stays as it was."""
    table = table * 1.5  # a checkpoint's inputs may not change
    before = table * 3
    table /= 2.0
    table *= table.transpose(0, 1).transpose(0, 1).sigmoid()
    return x * before + table.masked_fill_(torch.eye(T, D).bool(), 0.5)


def changed_by_functions(net: Any, x: Tensor, table: Tensor) -> Tensor:
    """As layers with ``inplace=True`` do, that between the layers of Swin v2's table among them."""
    places = torch.linspace(-1, 1, T * D).view(T, D).sin().to(x.dtype)
    own = F.dropout(F.relu(net.norm(places), inplace=True), 0.0, True, True)
    return x * own + F.leaky_relu(table - 0.5, 0.1, inplace=True)


def twice(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return (x + table) * table


EXACT = [
    windows, windows_that_differ, masked_windows, time_first, parts, prompt, expanded_prompt,
    expanded_as_the_samples, products, layers, added_in_place, changed_in_place, changed_by_functions,
    twice,
]  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(B, T, 2, generator=draw).double(), torch.arange(B)


def check(use: Any, mode: str, inside: str = "") -> None:
    """Two steps against one sample at a time.

    Args:
        use: How the table meets the samples' tensors.
        mode: Of private training.
        inside: What is in activation checkpoints.
    """
    x, y = batch()
    rows = per_sample_gradients(Net(use, inside), lambda m, one: LOSS(m(one[0]), one[1]), (x, y))
    c = float(norms(rows).min()) / 2
    model = Net(use, inside).double()
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
