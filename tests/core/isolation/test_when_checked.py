"""When the isolation check is made, and that it leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.core.isolation.check import Isolation, Schedule
from opacus.core.isolation.undisturbed import undisturbed, without_dropout
from opacus.core.isolation.unit_slices import UnitRows, structure
from tests.helpers.isolation import (
    MODES,
    B,
    mlp,
    private,
    step,
    vectors,
)


def test_when_checks_are_made(checks: list[int]) -> None:
    parts = private(mlp(), "ghost_bk")
    parts[0].isolation.interval = 10
    made = []
    for number in range(25):
        before = len(checks)
        step(parts, vectors(B + number % 3))  # Poisson sampling draws another number each time
        made += [number] * (len(checks) - before)
    assert made == [0, 10, 20]
    with pytest.raises(ValueError, match="interval must be"):
        parts[0].isolation.interval = 0


def test_a_new_structure_is_checked(checks: list[int]) -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(6, 3)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return self.l(x if scale is None else x * scale)

    parts = private(Optional(), "hooks")
    x, y = vectors()
    for batch in ((x, y), (x, y), (x, torch.ones(B, 1), y), (x, torch.ones(B, 1), y)):
        step(parts, batch)
    assert len(checks) == 2


def test_many_structures_take_little_time() -> None:
    schedule = Schedule()
    made = 0
    for number in range(10_000):
        if schedule.due(number):  # each batch is another
            schedule.note(number)
            made += 1
        schedule.steps += 1
    assert 8 < made < 45


def test_structures_and_rows() -> None:
    def key(rows: int, length: int) -> Any:
        inputs = {"ids": torch.zeros(rows, length).long(), "mask": None}
        return structure(inputs, rows, sizes=True, training=True)

    assert key(5, 7) == key(6, 9)
    assert key(5, 5) != key(5, 7)  # as many rows as positions
    rows = UnitRows(3)
    mask = torch.eye(3)
    one = rows.select({"x": torch.arange(6.0).view(3, 2), "mask": mask, "k": 2}, [2])
    assert one["x"].tolist() == [[4.0, 5.0]] and one["k"] == 2
    assert UnitRows(3, squares=False).select((mask,), [2])[0] is mask


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_with_and_without(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after three steps, buffers, and the random states, bit for bit."""
    ends = []
    for on in ("1", "0"):
        monkeypatch.setenv("OPACUS_ISOLATION_CHECK", on)
        monkeypatch.setattr(Isolation, "_warned", True)
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        model.register_buffer("seen", torch.zeros(()))
        model.register_forward_hook(lambda m, i, o: m.seen.add_(1.0) and None)
        parts = private(model, mode)
        for _ in range(3):
            step(parts, vectors())
        state = [*model.state_dict().values(), torch.get_rng_state(), torch.rand(3)]
        ends.append(([t.clone() for t in state], random.random(), model.training))
    (one, *rest), (two, *others) = ends
    assert rest == others
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def test_undisturbed_puts_everything_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    model(torch.randn(4, 2)).sum().backward()
    grad, mean = model[0].weight.grad, model[2].running_mean
    kept, count = mean.clone(), model[2].num_batches_tracked.clone()
    assert grad is not None
    state = torch.get_rng_state()
    with undisturbed(model), without_dropout(model):
        assert model[0].weight.grad is None
        ones = torch.ones(8, 2)
        assert torch.equal(model[1](ones), ones)
        assert torch.equal(F.dropout(ones, 0.9), ones)
        q = torch.randn(1, 1, 4, 2)
        got = F.scaled_dot_product_attention(q, q, q, None, 0.9)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q))
        model(torch.randn(4, 2)).sum().backward()
        model[0].calls = 1
        torch.rand(5)
    assert model[0].weight.grad is grad
    assert not hasattr(model[0], "calls")
    assert model[1].training
    assert model[2].running_mean is mean
    assert torch.equal(mean, kept)
    assert torch.equal(model[2].num_batches_tracked, count)
    assert torch.equal(torch.get_rng_state(), state)
