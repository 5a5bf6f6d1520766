"""What the isolation check cannot see, or may not refuse, is told in a warning."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus import IsolationError
from opacus.core.isolation.check import Isolation
from tests.helpers.isolation import (
    MODES,
    B,
    Pair,
    in_batch,
    mlp,
    private,
    step,
    vectors,
)


class Noisy(nn.Module):
    def __init__(self, generator: torch.Generator | None, change: Any = torch.tanh) -> None:
        super().__init__()
        self.a, self.l, self.generator, self.change = (
            nn.Linear(6, 6),
            nn.Linear(6, 3),
            generator,
            change,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.change(self.a(x + torch.randn(x.shape, generator=self.generator))))


@pytest.mark.parametrize("generator", [None, torch.Generator()])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_draws_random_numbers(mode: str, generator: torch.Generator | None) -> None:
    parts = private(Noisy(generator), mode)
    said = "random numbers of its own" if generator is None else "a generator of its own"
    with pytest.warns(UserWarning, match=said):
        step(parts, vectors())
    step(parts, vectors())  # once


SIZES = [1.0]


def of_all_before(x: Tensor) -> Tensor:
    out = x.tanh() * SIZES[0]
    SIZES[0] = 0.5 * SIZES[0] + float(x.detach().abs().mean())
    return out


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_keeps_something_where_nothing_finds_it(mode: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model.register_forward_pre_hook(lambda module, args: (of_all_before(args[0]),))
    with pytest.warns(UserWarning, match="keeps something of samples where nothing finds it"):
        step(private(model, mode), vectors())


def unknown(x: Tensor) -> Tensor:
    """An operation that is not followed."""
    return torch.segment_reduce(x, "sum", lengths=torch.ones(len(x)).long())


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_shows_that_samples_are_by_themselves(mode: str) -> None:
    parts = private(Noisy(torch.Generator(), unknown), mode)
    for _ in range(2):
        with pytest.raises(IsolationError, match="nothing shows that a sample's gradient"):
            step(parts, vectors())
    parts = private(Noisy(None, unknown), mode)  # it is compared with copies of itself
    with pytest.warns(UserWarning, match="random numbers of its own"):
        step(parts, vectors())


@pytest.mark.usefixtures("unfollowed")
@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_is_followed(mode: str) -> None:
    with pytest.raises(IsolationError, match="nothing shows that a sample's gradient"):
        step(private(Noisy(torch.Generator()), mode), vectors())


class Experts(nn.Module):
    """A router that draws one of two experts for each sample, mostly the same one."""

    def __init__(self, coupled: bool = False) -> None:
        super().__init__()
        self.l, self.other = nn.Linear(6, 3), nn.Linear(6, 3)
        self.scale = (lambda x: float(x.detach().norm())) if coupled else (lambda x: 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale(x)
        return torch.where(torch.rand(len(x), 1) < 0.3, self.other(x), self.l(x))


def test_choices_by_random_numbers_that_often_fall_alike() -> None:
    said, batch = 0, vectors()
    for seed in range(12):
        parts = private(Experts(), "ghost_bk")
        torch.manual_seed(seed)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(parts, batch)
        said += any("random numbers of its own" in str(w.message) for w in found)
    assert said


@pytest.mark.parametrize("mode", MODES)
def test_samples_that_depend_on_others_beside_random_numbers(mode: str) -> None:
    for seed in range(12):
        parts = private(Experts(coupled=True), mode)
        torch.manual_seed(seed)
        with pytest.raises(IsolationError, match="is not its own"):
            step(parts, vectors())


class Leaky(nn.Module):
    """On a CPU numbers are drawn for negative elements alone: their count depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.rrelu(self.l(x), training=True))
        return out


@pytest.mark.parametrize("mode", MODES)
def test_numbers_whose_count_depends_on_values_make_no_sample_another(mode: str) -> None:
    for seed in range(4):
        parts = private(Leaky(), mode)
        torch.manual_seed(seed)
        with pytest.warns(UserWarning, match="random numbers of its own"):
            step(parts, vectors())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.h(self.e(ids))


def labels(even: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(0, 12, (B, 10))
    targets = ids.clone()
    if not even:
        targets[2:5, 3:] = -100
    return ids, targets


def over_tokens(model: Any, criterion: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def test_means_over_the_tokens_of_the_batch() -> None:
    parts = private(Tokens(), "hooks")
    with pytest.warns(UserWarning, match="mean over the tokens of the batch"):
        step(parts, labels(even=False), over_tokens)
    step(private(Tokens(), "hooks"), labels(even=True), over_tokens)


def test_means_over_class_weights() -> None:
    def weighted(model: Any, criterion: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 20.0]))

    with pytest.warns(UserWarning, match="class weights"):
        step(private(mlp(), "hooks"), vectors(), weighted)


@pytest.mark.usefixtures("unfollowed")
def test_the_check_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    monkeypatch.setattr(Isolation, "_warned", False)
    with pytest.warns(UserWarning, match="OPACUS_ISOLATION_CHECK=0"):
        parts = private(Pair(), "ghost_bk")
    step(parts, vectors(), in_batch)
    private(Pair(), "ghost_bk")  # once
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        private(Pair(), "ghost_bk")


# --- outputs and inputs in containers that torch's pytrees do not open ---


@dataclass
class Held:
    x: Any


class Coupled(nn.Module):
    """The gradient of each sample depends on the sign of a sum over all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Any) -> Any:
        x = batch if isinstance(batch, Tensor) else batch.x
        output = self.net(x)
        output = output * (output.detach() * x[:, :1]).sum().sign()
        return output if isinstance(batch, Tensor) else Held(output)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [Held, lambda x: x])
def test_outputs_in_a_dataclass_are_checked(wrap: Any, mode: str) -> None:
    torch.manual_seed(0)
    parts, (x, y) = private(Coupled(), mode), vectors()

    def loss(model: Any, criterion: Any, batch: Any) -> Any:
        output = model(batch[0])
        return criterion(getattr(output, "x", output), batch[1])

    with pytest.raises((IsolationError, ValueError), match="sample"):
        step(parts, (wrap(x), y), loss)


class Aside(nn.Module):
    """What it takes and gives cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Any) -> Any:
        self.output = self.net(batch() if callable(batch) else batch)


@pytest.mark.parametrize(
    ("wrap", "what"),
    [(lambda x: x, "returned NoneType"), (lambda x: lambda: x, "was called with no tensor")],
)
def test_what_cannot_be_looked_into_is_told_once(wrap: Any, what: str) -> None:
    (model, optimizer, criterion), (x, y) = private(Aside(), "hooks"), vectors()
    with pytest.warns(UserWarning, match=what) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            model(wrap(x))
            criterion(model.output, y).backward()
            optimizer.step()
    assert len([one for one in seen if "nothing checks" in str(one.message)]) == 1
