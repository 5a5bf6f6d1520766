"""Models that leave out layers by chance (LayerDrop), on batches of new structures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import oracle
from tests.helpers.releases import CLIP, private

T, D = 5, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(3, D), nn.Linear(D, 2)
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.scale = 1.0

    def forward(self, x: Tensor, left_out: frozenset[int]) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.blocks):
            if place not in left_out:
                x = x + torch.tanh(block(x)) * self.scale
        output: Tensor = self.head(x.mean(1))
        return output


# In each step: batch size (T is another structure), a setting, and blocks that do not run.
STEPS = [(4, 1.0, set()), (4, 1.0, {1}), (T, 1.0, {1}), (T, 1.0, {1, 2}), (T, 1.0, {0})]
STEPS += [(4, 0.5, {2}), (4, 0.5, {2}), (4, 0.5, set()), (4, 0.5, {0, 1, 2}), (T, 0.5, {1})]


def loss_of(model: Any, one: Any) -> Tensor:
    return nn.functional.cross_entropy(model(one[0], model.left_out), one[1])


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_layer_that_first_runs_later_is_exact(mode: str) -> None:
    net, plain = Net().double(), Net().double()
    model, optimizer, criterion, _ = private(net, mode)
    for seed, (count, scale, left_out) in enumerate(STEPS):
        net.scale = plain.scale = scale
        plain.left_out = frozenset(left_out)  # type: ignore[assignment]
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(count, T, 3, generator=draw).double() * 3
        y = torch.randint(2, (count,), generator=draw)
        grads = oracle.per_sample_gradients(plain, loss_of, (x, y))
        optimizer.zero_grad()
        criterion(model(x, frozenset(left_out)), y).backward()
        optimizer.step()
        for name, want in oracle.clipped_sum(grads, CLIP).items():
            got = net.get_parameter(name).grad
            assert got is not None
            assert oracle.relative_error(got, want) < 1e-9, (seed, name)
