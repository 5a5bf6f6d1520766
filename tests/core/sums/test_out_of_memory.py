"""After a pass that found no memory the next one begins with all that the process may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.platform.memory import Card
from opacus.core.record import recorder
from opacus.core.sums.limits import Limits
from tests.helpers.isolation import private, step, vectors

GPU = torch.device("cuda")


class Full(torch.autograd.Function):
    """Finds no memory in the backward pass, if it is told so."""

    on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Full.on:
            raise torch.OutOfMemoryError("planted")
        return grad


class Net(nn.Module):
    """Finds no memory at a place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.error: type[Exception] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("planted")
        return self.last(Full.apply(self.first(x)))


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("place", ["forward", "backward", "other error"])
def test_pieces_go_back_to_the_card(mode: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(recorder, "give_back_to_the_card", lambda: calls.append(None))
    net = Net()
    parts, batch = private(net, mode), vectors()
    step(parts, batch)
    assert not calls
    error = ValueError if place == "other error" else torch.OutOfMemoryError
    net.error = None if place == "backward" else error
    monkeypatch.setattr(Full, "on", place == "backward")
    with pytest.raises(error, match="planted"):
        step(parts, batch)
    assert not calls  # the failed pass is still held by the error
    net.error, Full.on = None, False
    step(parts, batch)
    step(parts, batch)
    assert len(calls) == (place != "other error")


@pytest.mark.parametrize(("asked", "peak"), [(None, 50), (20, 20), (200, 50)])
def test_no_more_may_be_used_than_there_is(
    asked: int | None, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Card, "most_in_use", lambda self, device: 50)
    limits = Limits()
    limits.default_peak = True
    limits.peak = asked
    assert limits.now(GPU) == (None, peak)
    assert limits.now(torch.device("cpu"))[1] == asked
