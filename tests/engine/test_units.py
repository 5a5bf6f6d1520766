"""Units that are not rows: found by the trail, or named by the user; against one unit at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests import oracle

B, T, D, CLIP = 5, 4, 6, 0.05
MODES = ["hooks", "functorch", "ghost", "ghost-deferred", "ghost_bk", "ghost-formed"]


class Net(nn.Module):
    """Layers of several kinds, each of which a test's function uses as it likes."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.norm, self.conv = nn.LayerNorm(D), nn.Conv1d(D, D, 3, padding=1)
        self.groups = nn.GroupNorm(2, D)
        self.head, self.use = nn.Linear(D, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, x))


def flattened(net: Any, x: Tensor) -> Tensor:
    return net.norm(net.a(x.reshape(-1, D)).tanh()).view(-1, T, D).mean(1)


def time_major(net: Any, x: Tensor) -> Tensor:
    return net.norm(net.b(x.transpose(0, 1)).tanh()).mean(0)


def by_length(net: Any, x: Tensor) -> Tensor:
    order = x.detach().norm(dim=(1, 2)).argsort()
    return net.norm(net.a(x[order]).tanh())[order.argsort()].mean(1)


def halting(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    active = x.detach().norm(dim=(1, 2)) > 4
    h = h.clone()
    h[active] = h[active] + net.a(h[active])
    return h.mean(1)


def routed(net: Any, x: Tensor) -> Tensor:
    """A mixture of two experts, by token, with as many tokens each as the data say."""
    flat = x.reshape(-1, D)
    out = torch.zeros_like(flat)
    chosen = (flat.detach()[:, 0] > 0.3).long()
    for number, expert in enumerate((net.a, net.b)):
        (some,) = torch.where(chosen == number)
        out.index_add_(0, some, expert(flat[some]).tanh() * 2)
    return net.norm(out.view(x.shape)).mean(1)


def slots(net: Any, x: Tensor) -> Tensor:
    """Experts with room for all tokens in rows that are mostly empty."""
    flat = x.reshape(-1, D)
    chosen = (flat.detach()[:, 0] > 0.3).long()
    room = flat.new_zeros(2, len(flat), D)
    places = torch.arange(len(flat))
    room[chosen, places] = flat
    out = torch.stack([net.a(room[0]), net.b(room[1])])
    return out[chosen, places].view(x.shape).tanh().mean(1)


def joined(net: Any, x: Tensor) -> Tensor:
    first, second = net.a(torch.cat([x, x.flip(1)])).tanh().chunk(2)
    return (first * second).mean(1)


def windows(net: Any, x: Tensor) -> Tensor:
    rows = x.unfold(1, 3, 1).permute(0, 1, 3, 2).reshape(-1, 3, D)  # [B * 2, 3, D]
    return net.groups(net.conv(rows.transpose(1, 2))).tanh().mean(-1).view(-1, 2, D).sum(1)


def frames(net: Any, x: Tensor) -> Tensor:
    """A convolution for those samples that are chosen by their values."""
    some = x.detach().norm(dim=(1, 2)) > 3
    out = net.a(x).transpose(1, 2)
    out = out.index_put((some,), net.groups(net.conv(out[some])).tanh())
    return out.mean(-1)


def checkpointed(net: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda h: flattened(net, h), x, use_reentrant=False)


USES = [
    flattened, time_major, by_length, halting, routed, slots, joined, windows, frames,
    checkpointed,
]  # fmt: skip


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-0.5, 0.7, B).view(B, 1, 1)[torch.randperm(B, generator=g)]
    return torch.randn(B, T, D, generator=g) * scales, torch.arange(B) % 3


def private(model: nn.Module, mode: str, rows: int = B, reduction: str = "sum", **kw: Any) -> Any:
    mode, _, how = mode.partition("-")
    if how == "deferred":
        kw["deferred_norm"] = True
    if how == "formed":
        kw["use_ghost_clipping"] = False
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=kw.pop("criterion", None) or nn.CrossEntropyLoss(reduction=reduction),
        data_loader=DataLoader(TensorDataset(torch.zeros(rows, 1)), batch_size=rows),
        loss_reduction=reduction,
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **kw,
    )
    if len(made) == 4:
        return made
    return made[0], made[1], nn.CrossEntropyLoss(reduction=reduction), made[2]


def step(made: Any, x: Any, y: Tensor, **kw: Any) -> list[Tensor]:
    made[1].zero_grad()
    made[2](made[0](x, **kw), y).backward()
    made[1].step()
    return [p.grad.clone() for p in made[1].params]


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, members: list[Tensor]) -> list[Tensor]:
    """One unit at a time, by plain autograd in float64: its rows, and the sum of their losses."""
    model = copy.deepcopy(model).double()
    parameters = list(model.parameters())
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for rows in members:
        loss = sum(
            nn.functional.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
            for i in rows.tolist()
        )
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norms.append(float(torch.stack([g.norm() for g in found]).norm()))
        factor = min(1.0, CLIP / (norms[-1] + oracle.CLIPPING_EPS))
        total = [t + g * factor for t, g in zip(total, found, strict=True)]
    assert max(norms) > 2 * CLIP
    return total


def assert_right(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-4) -> None:
    error = torch.cat([(g.double() - w).flatten() for g, w in zip(got, want, strict=True)]).norm()
    assert error < tolerance * torch.cat([w.flatten() for w in want]).norm()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", USES)
def test_rows_are_followed_to_their_samples(use: Any, mode: str) -> None:
    model = Net(use)
    made = private(copy.deepcopy(model), mode)
    for seed in (0, 1):  # other rows are moved, and what is remembered is used
        x, y = inputs(seed)
        want = clipped_sum(model, x, y, list(torch.arange(B)[:, None]))
        assert_right(step(made, x, y), want)


# --- named by the user ---

USERS = torch.tensor([7, 3, 7, 9, 3])
OF_USERS = [torch.tensor([1, 4]), torch.tensor([0, 2]), torch.tensor([3])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "use", [lambda net, x: net.norm(net.a(x)).tanh().mean(1), flattened, routed]
)
def test_users_with_several_rows(use: Any, reduction: str, mode: str) -> None:
    model, (x, y) = Net(use), inputs()
    made = private(copy.deepcopy(model), mode, 3, reduction, privacy_unit="users")
    want = clipped_sum(model, x, y, OF_USERS)
    for _ in range(2):
        got = step(made, x, y, users=USERS)
        scale = 3.0 if reduction == "mean" else 1.0  # expected_batch_size is in users
        assert_right([g * scale for g in got], want)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_rows_of_nobody_add_nothing(mode: str) -> None:
    model, (x, y) = Net(flattened), inputs()
    made = private(copy.deepcopy(model), mode, 2, privacy_unit="users")
    got = step(made, x, y, users=torch.tensor([0, -1, 0, 1, -1]))
    assert_right(got, clipped_sum(model, x, y, [torch.tensor([0, 2]), torch.tensor([3])]))


class Tokens(nn.Module):
    """A token at a time, as far as the units are concerned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix, self.head = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(D, 5)

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.mix(self.words(ids)).tanh())


class TokenLoss(nn.Module):
    reduction = "mean"
    ignore_index = -100

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return each if self.reduction == "none" else each.mean()


@pytest.mark.parametrize("key", ["documents", "position_ids"])
@pytest.mark.parametrize("mode", ["ghost", "ghost-deferred", "ghost_bk"])
def test_documents_packed_in_rows(mode: str, key: str) -> None:
    g = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(0, n, (2, 7), generator=g) for n in (9, 5))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 3, 3]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    model = Tokens()
    made = private(copy.deepcopy(model), mode, 4, "mean", criterion=TokenLoss(), privacy_unit=key)
    got = step(made, ids, targets, **{key: documents if key == "documents" else positions})
    exact = copy.deepcopy(model).double()
    parameters, total, norms = list(exact.parameters()), 0.0, []
    for document in range(4):
        own = documents == document
        loss = nn.functional.cross_entropy(exact(ids[own][None])[0], targets[own])
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        norms.append(float(flat.norm()))
        total = total + flat * min(1.0, CLIP / (norms[-1] + oracle.CLIPPING_EPS)) / 4
    assert min(norms) > CLIP
    assert oracle.relative_error(torch.cat([g.flatten() for g in got]), total) < 1e-4


# --- bad input ---


@pytest.mark.parametrize(
    ("users", "message"),
    [
        (None, r"called with users="),
        (torch.zeros(B), r"tensor of integers"),
        (torch.zeros(B + 1, dtype=torch.long), r"shape \(6,\).*no input"),
        (torch.zeros(B, T + 1, dtype=torch.long), r"shape \(5, 5\)"),
        (torch.full((B,), -2), "negative"),
    ],
)
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_wrong_names_are_refused(mode: str, users: Any, message: str) -> None:
    made = private(Net(flattened), mode, privacy_unit="users")
    x, y = inputs()
    with pytest.raises(ValueError, match=message):
        step(made, x, y, **({} if users is None else {"users": users}))
    assert all(p.grad is None or not p.grad.any() for p in made[1].params)
    step(made, x, y, users=torch.arange(B))


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"privacy_unit": "users", "wrap_model": False}, "wrap_model=True"),
        ({"privacy_unit": ""}, "name of an argument"),
        ({"privacy_unit": 3}, "name of an argument"),
    ],
)
def test_arguments_that_cannot_be(kw: Any, message: str) -> None:
    model = Net(flattened)
    before = set(vars(model))
    with pytest.raises(ValueError, match=message):
        private(model, "ghost", **kw)
    assert set(vars(model)) == before
