"""``opacus.check_isolation``: the check by hand, of a model that need not be private."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opacus
from opacus import IsolationError
from tests.helpers.isolation import (
    MODES,
    encoder,
    mlp,
    private,
    vectors,
)


def test_check_isolation_of_an_ordinary_model() -> None:
    model, batch = encoder(), vectors()
    state = torch.get_rng_state()
    opacus.check_isolation(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_check_isolation_sees_the_whole_loss(mode: str) -> None:
    model, _, criterion = private(mlp(), mode)
    batch = vectors()
    opacus.check_isolation(model, batch, lambda m, b: criterion(m(b[0]), b[1]))

    def spread(m: Any, b: Any) -> Tensor:
        out = m(b[0])
        return F.cross_entropy(out, b[1]) + out.std(0, correction=0).sum()

    with pytest.raises(IsolationError, match="layer '0'"):
        opacus.check_isolation(model, batch, spread)


@pytest.mark.parametrize("mode", ["an ordinary model", *MODES])
def test_a_loss_that_is_a_sum(mode: str) -> None:
    model: Any = mlp()
    if mode != "an ordinary model":
        total = nn.CrossEntropyLoss(reduction="sum")
        model = private(model, mode, total, loss_reduction="sum")[0]

    def loss(m: Any, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1], reduction="sum")

    opacus.check_isolation(model, vectors(), loss)
    with pytest.raises(IsolationError, match=r"sample . is not its own"):
        opacus.check_isolation(model, vectors(), lambda m, b: loss(m, b) ** 2)


def test_check_isolation_says_what_it_cannot_do() -> None:
    x, y = vectors()

    def loss(m: Any, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1])

    with pytest.raises(ValueError, match="at least two samples"):
        opacus.check_isolation(mlp(), (x[:1], y[:1]), loss)
    with pytest.raises(ValueError, match="eval mode"):
        opacus.check_isolation(mlp().eval(), (x, y), loss)
    with pytest.raises(ValueError, match="cannot be checked"):
        opacus.check_isolation(mlp(), (x, y), lambda m, b: m(b[0].view(7, 6)).sum())
    with pytest.raises(
        ValueError, match=r"cannot be checked: it is called as loss\(model, batch\)"
    ):
        opacus.check_isolation(mlp(), (x, y), lambda outputs: outputs.sum(1))
