"""Samples that a program puts into an order that values say, and back.

The first batches happen to be in order, so what is found in them must not be taken for the truth
later.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.helpers import oracle
from tests.helpers.releases import CLIP, private

B, T, D = 4, 3, 5


def order_of(x: Tensor) -> list[int]:
    keys = x[:, 0, 0].tolist()
    return sorted(range(len(keys)), key=keys.__getitem__)


def by_lists(net: Any, x: Tensor) -> Tensor:
    """``list`` takes a tensor apart in one operation."""
    order, rows = order_of(x), list(x)
    outputs = list(net.a(torch.stack([rows[i] for i in order])))
    return torch.stack([outputs[order.index(i)] for i in range(len(x))])


def by_rolling(net: Any, x: Tensor) -> Tensor:
    shift = order_of(x)[0]
    return net.a(x.roll(shift, 0)).roll(-shift, 0)


def by_places(net: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.numel()).view(x.shape)[x[:, 0, 0].argsort()]
    h = net.a(x.take(places))
    return torch.zeros_like(h).put(places, h)


def by_strides(net: Any, x: Tensor) -> Tensor:
    order, x = order_of(x), x.contiguous()

    def row(h: Tensor, i: int) -> Tensor:
        return h.as_strided((T, D), (D, 1), h.storage_offset() + i * T * D)

    h = net.a(torch.stack([row(x, i) for i in order]))
    return torch.stack([row(h, order.index(i)) for i in range(len(x))])


def by_packing(net: Any, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(
        x, 1 + (x[:, 1, 0] > 0).long(), batch_first=True, enforce_sorted=False
    )
    packed = packed._replace(data=net.a(packed.data))
    padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=T)
    return padded


class Net(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head, self.use = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.use(self, x).tanh()).tanh().mean(1))


def batch(seed: int, order: list[int] | slice) -> Tensor:
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed)).double() * 3
    return x[x[:, 0, 0].argsort()][order]


def assert_right_or_refused(made: Any, alone: nn.Module, x: Tensor) -> bool:
    """Whether it is right; else it was refused."""
    y = torch.arange(len(x)) % 3

    def loss(model: Any, one: Any) -> Tensor:
        return nn.functional.cross_entropy(model(one[0]), one[1])

    want = oracle.clipped_sum(oracle.per_sample_gradients(alone, loss, (x, y)), CLIP)
    model, optimizer, criterion, *_ = made
    optimizer.zero_grad()
    try:
        criterion(model(x), y).backward()
        optimizer.step()
    except RuntimeError as error:
        assert "run the step again" in str(error)
        return False
    for name, one in want.items():
        torch.testing.assert_close(model.get_parameter(f"_module.{name}").grad, one)
    return True


@pytest.mark.filterwarnings("ignore:the model moves rows:UserWarning")
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [by_lists, by_rolling, by_places, by_strides, by_packing])
def test_in_order_at_first(use: Any, mode: str) -> None:
    made, alone = private(Net(use).double(), mode), Net(use).double()
    for seed in range(4):
        assert assert_right_or_refused(made, alone, batch(seed, slice(None)))
    others = [[2, 0, 3, 1], [2, 0, 3, 1], [3, 2, 1, 0], [0, 1, 2, 3], [1, 3, 2, 0]]
    right = [assert_right_or_refused(made, alone, batch(9 + i, o)) for i, o in enumerate(others)]
    assert all(right[1:])  # what was refused once is followed from then on


def test_numbers_of_python_that_fall_alike_at_first() -> None:
    """Two samples are in an order that Python draws."""
    flips = iter((0, 0, 0, 0, 1, 1))

    def shuffled(net: Any, x: Tensor) -> Tensor:
        first = next(flips) if len(x) == 2 else 0
        while random.randrange(2) != first:
            pass
        rows = list(x)
        h = list(net.a(torch.stack([rows[first], rows[1 - first]])))
        return torch.stack([h[first], h[1 - first]])

    made, alone = private(Net(shuffled).double(), "ghost_bk"), Net(lambda net, x: net.a(x)).double()
    made[0].isolation.on = False
    right = [assert_right_or_refused(made, alone, batch(i, [0, 3])) for i in range(6)]
    assert all(right[:4]) and right[5]


def test_a_mask_that_all_samples_decide_on() -> None:
    """It is the same for all in the first batches, and alone."""

    def masked(net: Any, x: Tensor) -> Tensor:
        return torch.where((x > 40).any(), 9 * net.a(x), net.a(x))

    made, alone = private(Net(masked).double(), "ghost_bk"), Net(masked).double()
    x = batch(0, slice(None))
    x[0, 0, 0] = 99.0
    for one in (batch(1, slice(None)), batch(2, slice(None)), x):
        with pytest.raises(ValueError, match="of no single sample: any"):
            assert_right_or_refused(made, alone, one)


def test_joins_of_loops_are_as_many_as_there_are_samples() -> None:
    def loops(net: Any, x: Tensor) -> Tensor:
        return net.a(torch.stack(list(x)) + torch.stack([torch.stack(list(one)) for one in x]))

    made, alone = (
        private(Net(loops).double(), "ghost_bk"),
        Net(lambda net, x: net.a(2 * x)).double(),
    )
    for seed, rows in enumerate([4, 4, 4, 2, 3, 2, 3, 4]):
        assert assert_right_or_refused(made, alone, batch(seed, slice(rows)))
