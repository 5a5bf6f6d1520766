"""Parameters that are frozen and trained again between steps, after ``make_private``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus import IsolationError
from tests.helpers import oracle
from tests.helpers.releases import CLIP, private

T = 6
MODES = ["hooks", "ghost", "ghost_bk"]


class Net(nn.Module):
    """Tokens in, a class out; the gradient of what ``low`` gives may be scaled by the batch's."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4)
        self.low, self.high, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.couples = couples

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.low(self.table(tokens)))
        if self.couples and hidden.requires_grad:
            hidden.register_hook(lambda grad: grad / grad.norm())
        output: Tensor = self.head(torch.tanh(self.high(hidden)).mean(1))
        return output


def step(made: Any, tokens: Tensor, targets: Tensor) -> None:
    model, optimizer, criterion = made[:3]
    optimizer.zero_grad()
    criterion(model(tokens), targets).backward()
    optimizer.step()


def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (count, T), generator=draw)
    return tokens, torch.randint(3, (count,), generator=draw)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_takes_the_place_of_another_is_checked(mode: str) -> None:
    """As many nodes, inputs of the same sizes: nothing but the parameters shows it."""
    net = Net(couples=True).requires_grad_(False)
    net.requires_grad_(True)
    made = private(net, mode)
    for part in (net.low, net.table):
        part.requires_grad_(False)
    keep = net.table.weight  # the graph is as deep as with ``low`` trained
    net.table.register_forward_hook(lambda module, args, output: output.requires_grad_())
    for seed in range(3):
        step(made, *batch(8, seed))
    net.low.requires_grad_(True)
    net.high.requires_grad_(False)
    assert not keep.requires_grad
    with pytest.raises(IsolationError, match="low"):
        step(made, *batch(8, 3))


SCHEDULE = [("low", False), ("table", False), ("high", False), ("head", False), ("", True)]
SCHEDULE += [("table", False), ("low", False), ("", True)]


@pytest.mark.parametrize("mode", MODES)
def test_any_order_on_batches_of_any_size_is_exact(mode: str) -> None:
    net = Net(couples=False).double()
    made = private(net, mode)
    for place, (name, trained) in enumerate(SCHEDULE):
        for part, parameter in net.named_parameters():
            if part.startswith(name):
                parameter.requires_grad_(trained)
        if not any(p.requires_grad for p in net.parameters()):
            net.high.requires_grad_(True)
        data = batch(5 + place % 3, place)
        plain = Net(couples=False).double()
        plain.load_state_dict(net.state_dict())
        for own, other in zip(plain.parameters(), net.parameters(), strict=True):
            own.requires_grad_(other.requires_grad)
        grads = oracle.per_sample_gradients(
            plain, lambda m, one: nn.functional.cross_entropy(m(one[0]), one[1]), data
        )
        step(made, *data)
        for part, want in oracle.clipped_sum(grads, CLIP).items():
            got = net.get_parameter(part).grad
            assert got is not None
            assert oracle.relative_error(got, want) < 1e-9, (place, part)
