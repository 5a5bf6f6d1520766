"""Pictures of all samples in one line, dealt out to them: as many as samples, but not one each.

Batches of one structure come first in which each sample has one picture, so that what is found
there must not be taken for the truth later. All have frozen layers after the trained ones, as an
adapter between a vision tower and a language model does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import oracle
from tests.helpers.releases import CLIP, GHOST, private

B, T, D = 4, 5, 6
PICTURE = 9


def by_masked_scatter(tokens: Tensor, ids: Tensor, pictures: Tensor) -> Tensor:
    mask = (ids == PICTURE)[..., None].expand_as(tokens)
    return tokens.masked_scatter(mask, pictures)


def by_index(tokens: Tensor, ids: Tensor, pictures: Tensor) -> Tensor:
    tokens = tokens.clone()
    tokens[ids == PICTURE] = pictures
    return tokens


def by_slices(tokens: Tensor, ids: Tensor, pictures: Tensor) -> Tensor:
    rows, start = [], 0
    for row, count in zip(tokens, (ids == PICTURE).sum(1), strict=True):
        end = start + int(count)
        rows.append(torch.cat([pictures[start:end], row[int(count) :]]))
        start = end
    return torch.stack(rows)


def by_split(tokens: Tensor, ids: Tensor, pictures: Tensor) -> Tensor:
    parts = pictures.split((ids == PICTURE).sum(1).tolist())
    sums = torch.stack([part.sum(0) for part in parts])
    return tokens + sums[:, None]


WAYS = [by_masked_scatter, by_index, by_slices, by_split]


class Net(nn.Module):
    def __init__(self, deal: Callable[[Tensor, Tensor, Tensor], Tensor], frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projector, self.words = nn.Linear(3, D), nn.Embedding(PICTURE + 1, D)
        self.mixed, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.deal = deal
        for layer in (self.words, self.mixed, self.head) if frozen else ():
            layer.requires_grad_(False)

    def forward(self, ids: Tensor, pictures: Tensor) -> Tensor:
        tokens = self.deal(self.words(ids), ids, self.projector(pictures).tanh())
        scores = tokens @ tokens.transpose(1, 2)
        return self.head(self.mixed(scores.softmax(-1) @ tokens).tanh().mean(1))


def batch(counts: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(PICTURE, (B, T), generator=draw)
    for row, count in zip(ids, counts, strict=True):
        row[:count] = PICTURE
    return ids, torch.randn(B, 3, generator=draw, dtype=torch.float64) * 3


def step(made: Any, ids: Tensor, pictures: Tensor) -> None:
    model, optimizer, criterion, *_ = made
    optimizer.zero_grad()
    criterion(model(ids, pictures), torch.arange(B) % 3).backward()
    optimizer.step()


def loss_of(model: Any, one: Any) -> Tensor:
    return nn.functional.cross_entropy(model(*one[0]), one[1])


@pytest.mark.filterwarnings("ignore:whether a sample's gradient:UserWarning")
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("mode", ["hooks", *GHOST])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("deal", WAYS)
def test_two_of_one_sample(deal: Any, frozen: bool, mode: str, before: int) -> None:
    net = Net(deal, frozen).double()
    made = private(net, mode)
    for seed in range(before):
        given = batch([1] * B, seed)
        alone = Net(deal, frozen)
        rows = oracle.per_sample_gradients(alone, loss_of, (given, torch.arange(B) % 3))
        step(made, *given)
        for name, want in oracle.clipped_sum(rows, CLIP).items():
            got = net.get_parameter(name).grad
            assert got is not None
            torch.testing.assert_close(got, want)
    with pytest.raises((ValueError, RuntimeError), match=r"of no single|not its own"):
        step(made, *batch([2, 0, 1, 1], 5))


class Checkpointed(Net):
    """A reentrant checkpoint hides the first run from autograd, in which gradients flow later."""

    def forward(self, ids: Tensor, pictures: Tensor) -> Tensor:
        def dealt(words: Tensor) -> Tensor:
            return self.deal(words, ids, self.projector(pictures).tanh())

        tokens = checkpoint(dealt, self.words(ids), use_reentrant=True)
        assert isinstance(tokens, Tensor)
        scores = tokens @ tokens.transpose(1, 2)
        return self.head(self.mixed(scores.softmax(-1) @ tokens).tanh().mean(1))


@pytest.mark.parametrize("mode", ["hooks", *GHOST])
def test_in_a_reentrant_checkpoint(mode: str) -> None:
    made = private(Checkpointed(by_masked_scatter, frozen=False).double(), mode)
    made[0].isolation.interval = 10**6
    for seed in range(3):
        step(made, *batch([1] * B, seed))
    with pytest.raises(ValueError, match="masked_scatter puts more elements"):
        step(made, *batch([2, 0, 1, 1], 5))
