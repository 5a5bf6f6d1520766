"""Units that are tokens of a row: neighbours that a document sees, and rows taken for another's."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opacus.isolation import IsolationError, check_isolation
from tests.helpers.units import D, assert_right, clipped, private, step

R, T = 2, 8
MODES = ["ghost", "ghost-deferred", "ghost_bk"]
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [2, 2, 2, 2, 3, 3, -1, -1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 0, 1, 0, 0]])


class Net(nn.Module):
    """Layers that a test's function uses as it likes."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(9, D), nn.Embedding(T, D)
        self.mix, self.head, self.use = nn.Linear(D, D), nn.Linear(D, 5), use

    def forward(self, ids: Tensor, position_ids: Any = None, mask: Any = None, **more: Any) -> Any:
        h = self.words(ids)
        if position_ids is not None:
            h = h + self.places(position_ids)
        return self.head(self.use(self, h, mask, **more))


class Loss(nn.Module):
    reduction = "sum"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.mT, targets, reduction=self.reduction)


def each_token(net: Any, h: Tensor, mask: Any = None) -> Tensor:
    return net.mix(h).tanh()


def summed_up(net: Any, h: Tensor, mask: Any = None) -> Tensor:
    return net.mix(h).tanh().cumsum(1)


def attended(net: Any, h: Tensor, mask: Any = None) -> Tensor:
    scores = net.mix(h) @ h.mT
    own = torch.ones(scores.shape[1:], dtype=torch.bool).tril() if mask is None else mask
    own = own.squeeze(1) if own.dim() == 4 else own
    scores = scores + own if own.is_floating_point() else scores.masked_fill(~own, -1e9)
    return scores.softmax(-1) @ h


def between(net: Any, h: Tensor, mask: Any = None, cu_seqlens: Any = None) -> Tensor:
    pairs = zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)
    mixed = net.mix(h)
    return torch.cat([mixed[:, a:b].cumsum(1) for a, b in pairs], 1)


def counted_in_the_row(net: Any, h: Tensor, mask: Any = None) -> Tensor:
    return net.mix(h).tanh() * torch.arange(1, h.shape[1] + 1)[:, None]


def flattened_by_time(net: Any, h: Tensor, mask: Any = None) -> Tensor:
    return net.mix(h.transpose(0, 1).reshape(-1, D)).tanh().view(-1, len(h), D).transpose(0, 1)


def sorted_tokens(net: Any, h: Tensor, mask: Any = None) -> Tensor:
    flat = h.reshape(-1, D)
    order = flat.detach()[:, 0].argsort()
    return net.mix(flat[order]).tanh()[order.argsort()].view(h.shape)


def checkpointed(net: Any, h: Tensor, mask: Any = None) -> Tensor:
    return checkpoint(attended, net, h, mask, use_reentrant=False)


def batch(documents: Tensor = DOCUMENTS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(n, documents.shape, generator=g) for n in (9, 5))
    return ids, targets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "use", [summed_up, attended, checkpointed, counted_in_the_row, flattened_by_time, sorted_tokens]
)
def test_what_is_not_a_documents_own_is_refused(use: Any, mode: str) -> None:
    made = private(Net(use), mode, 4, criterion=Loss(), privacy_unit="documents")
    with pytest.raises(IsolationError, match=r"is not its own.*see each other"):
        step(made, *batch(), documents=DOCUMENTS)
    assert all(p.grad is None or not p.grad.any() for p in made[1].params)


@pytest.mark.parametrize("use", [each_token, summed_up])
def test_hooks_look_at_documents_too(use: Any) -> None:
    model, optimizer, _, _ = private(Net(use), "hooks", 4, privacy_unit="documents")
    ids, targets = batch()
    Loss()(model(ids, documents=DOCUMENTS), targets).backward()
    with pytest.raises(IsolationError) if use is summed_up else nullcontext():
        optimizer.step()


def test_as_many_rows_as_tokens_are_told_apart() -> None:
    """Rows and tokens that have changed places look alike by their shapes."""

    def time_major(net: Any, h: Tensor, mask: Any = None) -> Tensor:
        return net.mix(h.transpose(0, 1)).tanh().transpose(0, 1)

    documents = torch.arange(3)[:, None] * 2 + torch.tensor([0, 0, 1])
    made = private(Net(time_major), "ghost_bk", 6, criterion=Loss(), privacy_unit="documents")
    with pytest.raises(IsolationError):
        step(made, *batch(documents), documents=documents)


SEEN = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
MASKS = {
    "of bools": SEEN,
    "of bools for heads": SEEN[:, None],
    "added, for heads": torch.zeros(R, 1, T, T).masked_fill(~SEEN[:, None], -1e9),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("use", [attended, checkpointed])
def test_documents_that_a_mask_separates(use: Any, mask: str, mode: str) -> None:
    made = private(Net(use), mode, 4, criterion=Loss(), privacy_unit="documents")
    (ids, targets), more = batch(), {"position_ids": POSITIONS, "mask": MASKS[mask]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = step(made, ids, targets, documents=DOCUMENTS, **more)
    assert made[0].isolation.schedule.checks == 1
    assert_right(got, of_documents(use, ids, targets, DOCUMENTS, POSITIONS))


def of_documents(
    use: Any, ids: Tensor, targets: Tensor, documents: Tensor, positions: Any
) -> list[Tensor]:
    """One document at a time, in a row of its own."""
    exact = Net(use).double()
    losses = []
    for number in range(int(documents.max()) + 1):
        own = documents == number
        places = None if positions is None else positions[own][None]
        losses.append(Loss()(exact(ids[own][None], places), targets[own][None]))
    return clipped(list(exact.parameters()), losses)


@pytest.mark.parametrize("mode", MODES)
def test_documents_between_boundaries(mode: str) -> None:
    def alone(net: Any, h: Tensor, mask: Any = None) -> Tensor:
        return net.mix(h).cumsum(1)

    documents = DOCUMENTS[:1]
    made = private(Net(between), mode, 2, criterion=Loss(), privacy_unit="cu_seqlens")
    ids, targets = batch(documents)
    got = step(made, ids, targets, cu_seqlens=torch.tensor([0, 3, 8]))
    assert made[0].isolation.schedule.checks == 1
    assert_right(got, of_documents(alone, ids, targets, documents, None))


def test_what_cannot_be_cut_is_said() -> None:
    """As many features as tokens: is it a mask?"""

    def added(net: Any, h: Tensor, mask: Any = None) -> Tensor:
        return net.mix(h + mask[..., :D]).tanh()

    made = private(Net(added), "ghost_bk", 4, criterion=Loss(), privacy_unit="documents")
    with pytest.warns(UserWarning, match="cannot be told from as many features"):
        step(made, *batch(), documents=DOCUMENTS, mask=torch.ones(R, T, T))


def test_check_isolation_compares_rows_whatever_their_names() -> None:
    model, _, _, _ = private(nn.Linear(D, 5), "hooks", 5, privacy_unit="users")
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    own = {"x": x, "users": torch.tensor([7, 3, 7, 9, 1])}

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch["x"], users=batch["users"]).square().sum()

    check_isolation(model, own, loss)
    with pytest.raises(IsolationError):
        check_isolation(model, own, lambda m, b: loss(m, b).square())


# --- the criterion ---


class Contrast(nn.Module):
    """A sample's loss has others' outputs in it."""

    reduction = "sum"

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        rows = out.flatten(0, -2)
        each = nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="none")
        each = each.view(targets.shape)
        return each if self.reduction == "none" else each.sum()


class Shifted(Loss):
    """As of the next token."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().forward(logits[:, :-1], targets[:, 1:])


class NormalisedRow(Loss):
    """As a mean over the row's tokens, which are others' too."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        each = super().forward(logits, targets)
        return each / logits.detach().exp().sum((1, 2))[:, None] if each.dim() else each


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("criterion", [Contrast(), NormalisedRow()])
def test_a_criterion_that_mixes_documents_is_refused(criterion: Any, mode: str) -> None:
    made = private(Net(each_token), mode, 4, criterion=criterion, privacy_unit="documents")
    with pytest.raises(IsolationError, match="the criterion mixes samples"):
        step(made, *batch(), documents=DOCUMENTS)


@pytest.mark.parametrize("mode", MODES)
def test_a_criterion_that_mixes_users_is_refused(mode: str) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 5))
    made = private(model, mode, 3, criterion=Contrast(), privacy_unit="users")
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    with pytest.raises(IsolationError, match="the criterion mixes samples"):
        step(made, x, torch.arange(5), users=torch.tensor([7, 3, 7, 9, 3]))


class OfUsers(nn.Module):
    """The rows of a user, of which there are two, take each other's mean."""

    reduction = "sum"

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        pairs = out.view(-1, 2, *out.shape[1:]).mean(1).repeat_interleave(2, 0)
        return nn.functional.cross_entropy(out + pairs, targets, reduction=self.reduction)


@pytest.mark.parametrize("mode", MODES)
def test_a_criterion_may_mix_a_users_own_rows(mode: str) -> None:
    made = private(nn.Linear(D, 5), mode, 3, criterion=OfUsers(), privacy_unit="users")
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(made, x, torch.arange(6) % 5, users=torch.tensor([7, 7, 3, 3, 9, 9]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("criterion", [Loss(), Shifted()])
def test_a_criterion_of_tokens_is_right(criterion: Any, mode: str) -> None:
    made = private(Net(each_token), mode, 4, criterion=criterion, privacy_unit="documents")
    step(made, *batch(), documents=DOCUMENTS)
