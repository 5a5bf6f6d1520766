"""Samples that depend on each other are refused before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus import IsolationError
from tests.helpers.isolation import (
    MODES,
    Loss,
    Pair,
    in_batch,
    mlp,
    plain,
    private,
    step,
    vectors,
)


class Mixing(nn.Module):
    """Samples meet in the middle, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "mean":
            h = h - 0.1 * h.mean(0, keepdim=True)
        elif self.how == "attention":
            h = h + (h @ h.T).softmax(1) @ h
        elif self.how == "capacity":
            h = h * (torch.arange(len(h)) < 4)[:, None]
        elif self.how == "scale":  # as of a tensorwise low-precision format
            scale = h.detach().abs().max() / 7
            h = h + ((h / scale).round() * scale - h).detach()
        return self.b(h.tanh())


class Auxiliary(nn.Module):
    """A load-balancing loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4, bias=False), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(-1)
        out = (self.experts(x).view(-1, 4, 3) * p[..., None]).sum(1)
        share = F.one_hot(p.argmax(-1), 4).float().mean(0)
        return out, 4 * (share * p.mean(0)).sum()


def with_auxiliary(model: Any, criterion: Any, batch: Any) -> Any:
    out, auxiliary = model(batch[0])
    return criterion(out, batch[1]) + auxiliary


class Normalised(nn.Module):
    """Cross-entropy relative to the batch's mean."""

    reduction = "mean"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(x, y, reduction="none")
        losses = losses / losses.mean()
        return losses if self.reduction == "none" else losses.mean()


COUPLED: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    **{how: ((lambda how=how: Mixing(how)), plain, None) for how in ("mean", "attention")},
    **{how: ((lambda how=how: Mixing(how)), plain, None) for how in ("capacity", "scale")},
    "auxiliary loss": (Auxiliary, with_auxiliary, None),
    "contrast": (Pair, in_batch, None),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", COUPLED)
@pytest.mark.usefixtures("unfollowed")
def test_samples_that_depend_on_each_other(kind: str, mode: str) -> None:
    make, loss, criterion = COUPLED[kind]
    torch.manual_seed(0)
    model = make()
    before = [p.clone() for p in model.parameters()]
    parts = private(model, mode, criterion)
    # A loss of the whole batch is refused where it is added to our criterion's.
    refused = ValueError if kind == "auxiliary loss" and "ghost" in mode else IsolationError
    with pytest.raises(refused, match=r"layer|loss"):
        step(parts, vectors(), loss)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None or not p.grad.any()


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_a_criterion_that_mixes_samples(mode: str) -> None:
    with pytest.raises(IsolationError, match="the criterion mixes samples"):
        step(private(mlp(), mode, Normalised()), vectors())


@pytest.mark.usefixtures("unfollowed")
@pytest.mark.parametrize("mode", MODES)
def test_the_message_says_where_and_what(mode: str) -> None:
    with pytest.raises(IsolationError) as caught:
        step(private(Pair(), mode), vectors(), in_batch)
    text = str(caught.value)
    assert "layer 'a' (Linear), parameter 'a.weight'" in text
    assert "contrastive" in text
    assert "Nothing was released" in text


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_refused_batch_is_left(mode: str) -> None:
    parts = private(mlp(), mode)
    model = parts[0]
    isolation = model.isolation
    isolation.probe._differences = lambda *a: []
    step(parts, vectors())
    del isolation.probe._differences
    isolation.schedule.known.clear()
    watched = isolation._watched
    isolation._watched = lambda *a: setattr(w := watched(*a), "refusal", "it is wrong") or w
    released = [p.clone() for p in model.parameters()]
    with pytest.raises(IsolationError, match="it is wrong"):
        step(parts, vectors())
    del isolation._watched
    for p, old in zip(model.parameters(), released, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None
        assert getattr(p, "grad_sample", None) is None
        assert getattr(p, "summed_grad", None) is None
    step(parts, vectors())  # the next batch is as good as any


@pytest.mark.usefixtures("unfollowed")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failing", [2, 3])  # the run on some samples, the first on one
def test_running_out_of_memory_says_nothing_of_the_model(mode: str, failing: int) -> None:
    class Large(nn.Module):
        runs = 0
        full = True

        def forward(self, input: Tensor) -> Tensor:
            type(self).runs += 1
            if self.full and (self.runs >= failing if failing == 2 else len(input) == 1):
                raise torch.OutOfMemoryError("no room")
            return input * 1.0

    parts = private(nn.Sequential(nn.Linear(6, 3), Large()), mode)
    released = [p.clone() for p in parts[0].parameters()]
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        step(parts, vectors())
    for p, old in zip(parts[0].parameters(), released, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None
    Large.full = False
    step(parts, vectors())  # it is checked, and trains
    assert not torch.equal(next(iter(parts[0].parameters())), released[0])


@pytest.mark.usefixtures("unfollowed")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mixes", [False, True])
def test_fewer_samples_are_compared_where_memory_is_short(mode: str, mixes: bool) -> None:
    """The sums of the step are there beside the check's runs."""

    class Short(nn.Module):
        sizes: ClassVar[list[int]] = []

        def forward(self, input: Tensor) -> Tensor:
            self.sizes.append(len(input))
            if len(self.sizes) > 1 and len(input) > 2:
                raise torch.OutOfMemoryError("no room")
            return input - 0.3 * input.mean(0) if mixes else input * 1.0

    parts = private(nn.Sequential(nn.Linear(6, 8), Short(), nn.Linear(8, 3)), mode)
    if mixes:
        with pytest.raises(IsolationError, match="sample"):
            step(parts, vectors())
    else:
        step(parts, vectors())
    assert 2 in Short.sizes and max(Short.sizes[1:2]) > 2


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_rule_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the norms of two samples are swapped in one layer."""
    from opacus.core.norms.ledger import NormLedger

    add = NormLedger.add

    def swapped(self: Any, record: Any) -> None:
        if record.spec.name == "2":
            record.backprops = record.backprops.flip(0)
        add(self, record)

    monkeypatch.setattr(NormLedger, "add", swapped)
    # The second backward pass of "ghost" finds it first.
    with pytest.raises(RuntimeError, match="layer '2'"):
        step(private(mlp(), mode), vectors())
