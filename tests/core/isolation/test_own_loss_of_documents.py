"""Documents packed in rows, in `hooks`: the loss is the model's own or the user's, one number."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.isolation import IsolationError
from tests.helpers.units import D, assert_right, clipped, private

SMALL = 0.1  # so that some documents' gradients are not clipped: a wrong scale shows


class Words(nn.Module):
    """A token at a time; its own loss is what a test's function makes of those of tokens."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix, self.head = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(D, 5)
        self.reduce = reduce

    def forward(self, ids: Tensor, targets: Tensor, position_ids: Tensor) -> Tensor:
        logits = self.head(self.mix(self.words(ids)).tanh())
        losses = SMALL * nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        return self.reduce(losses, position_ids) if self.reduce else losses


def over_tokens(losses: Tensor, positions: Tensor) -> Tensor:
    return losses.mean()


def over_documents(losses: Tensor, positions: Tensor) -> Tensor:
    return of_each(losses, positions, mean=True).mean()


def summed(losses: Tensor, positions: Tensor) -> Tensor:
    return losses.sum()


def of_each(losses: Tensor, positions: Tensor, *, mean: bool) -> Tensor:
    own = (positions.flatten() == 0).cumsum(0) - 1
    sums = losses.new_zeros(int(own[-1]) + 1).index_add(0, own, losses.flatten())
    return sums / own.bincount() if mean else sums


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two documents a row, of 1 to 6 tokens."""
    g = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(n, (rows, 7), generator=g) for n in (9, 5))
    first = torch.arange(rows)[:, None] % 6 + 1
    places = torch.arange(7).expand(rows, 7)
    return ids, targets, places - first * (places >= first)


def of_document(
    model: nn.Module, ids: Tensor, targets: Tensor, positions: Tensor, number: int, how: str
) -> Tensor:
    """The loss of one document, in a row of its own."""
    own = ((positions == 0).flatten().cumsum(0) - 1).view(ids.shape) == number
    losses = model(ids[own][None], targets[own][None], positions[own][None])
    return losses.mean() if how == "mean" else losses.sum()


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("reduce", "how"), [(over_documents, "mean"), (summed, "sum")])
def test_losses_of_documents(reduce: Any, how: str, inside: bool, rows: int) -> None:
    ids, targets, positions = batch(rows)
    made = private(
        Words(reduce if inside else None), "hooks", 2 * rows, how, privacy_unit="position_ids"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = made[0](ids, targets, position_ids=positions)
        (loss if inside else reduce(loss, positions)).backward()
        made[1].step()
    assert made[0].isolation.schedule.checks == 1
    exact = Words(None).double()
    losses = [of_document(exact, ids, targets, positions, n, how) for n in range(2 * rows)]
    scale = 2 * rows if how == "mean" else 1
    assert_right(
        [p.grad * scale for p in made[1].params], clipped(list(exact.parameters()), losses)
    )


@pytest.mark.parametrize("rows", [1, 12])
def test_a_mean_over_the_tokens_of_the_batch_is_refused(rows: int) -> None:
    ids, targets, positions = batch(rows)
    made = private(Words(over_tokens), "hooks", 2 * rows, "mean", privacy_unit="position_ids")
    made[0](ids, targets, position_ids=positions).backward()
    with pytest.raises(IsolationError, match="mean over the tokens of the batch"):
        made[1].step()
