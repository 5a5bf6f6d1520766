"""Units that are not rows: found by the trail, or named by the user; against one unit at a time."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opacus.utils.batch_memory_manager import BatchMemoryManager
from tests.helpers import oracle
from tests.helpers.units import (
    CLIP,
    B,
    D,
    Net,
    T,
    assert_right,
    clipped_sum,
    flattened,
    inputs,
    joined,
    private,
    routed,
    step,
    time_major,
)

MODES = ["hooks", "functorch", "ghost", "ghost-deferred", "ghost_bk", "ghost-formed"]


def by_length(net: Any, x: Tensor) -> Tensor:
    order = x.detach().norm(dim=(1, 2)).argsort()
    return net.norm(net.a(x[order]).tanh())[order.argsort()].mean(1)


def halting(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    active = x.detach().norm(dim=(1, 2)) > 4
    h = h.clone()
    h[active] = h[active] + net.a(h[active])
    return h.mean(1)


def slots(net: Any, x: Tensor) -> Tensor:
    """Experts with room for all tokens in rows that are mostly empty."""
    flat = x.reshape(-1, D)
    chosen = (flat.detach()[:, 0] > 0.3).long()
    room = flat.new_zeros(2, len(flat), D)
    places = torch.arange(len(flat))
    room[chosen, places] = flat
    out = torch.stack([net.a(room[0]), net.b(room[1])])
    return out[chosen, places].view(x.shape).tanh().mean(1)


def an_expert_of_none(net: Any, x: Tensor) -> Tensor:
    """One that runs on no rows, which are viewed in another shape (as FSDP2 views them)."""
    flat = x.reshape(-1, D)
    for layer, rows in ((net.a, flat.detach()[:, 0] < 1e9), (net.b, flat.detach()[:, 0] > 1e9)):
        flat = flat.index_add(0, rows.nonzero()[:, 0], layer(flat[rows].view(-1, 1, D)).view(-1, D))
    return flat.view(x.shape).tanh().mean(1)


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
    checkpointed, an_expert_of_none,
]  # fmt: skip


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


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_unit_is_in_one_physical_batch_of_a_step(mode: str) -> None:
    """However batches are drawn: else each part is clipped by itself."""
    x, y = inputs()
    made = private(Net(flattened), mode, privacy_unit="users")
    model, optimizer, criterion, _ = made

    def part(rows: list[int], follows: bool) -> None:
        optimizer.signal_skip_step(follows)
        optimizer.zero_grad()
        criterion(model(x[rows], users=USERS[rows]), y[rows]).backward()
        optimizer.step()

    part([0, 1], True)
    with pytest.raises(RuntimeError, match=r"rows of the units \[7\]"):
        part([2, 3], False)
    with pytest.raises((RuntimeError, ValueError), match=r"no clipped gradient|not initialized"):
        optimizer.step()  # nothing is left of either
    part([0, 2], True)
    part([1, 3, 4], False)
    want = clipped_sum(Net(flattened), x, y, OF_USERS)
    assert_right([p.grad for p in optimizer.params], want)
    optimizer.zero_grad()
    criterion(model(x[:2], users=USERS[:2]), y[:2]).backward()
    with pytest.raises(ValueError, match="nor is privacy_unit"):
        criterion(model(x[2:], users=USERS[2:]), y[2:]).backward()


def by_parts(mode: str, clear: str, users: Tensor) -> list[Tensor]:
    """The sum of a step of two physical batches, with gradients cleared somewhere in the loop."""
    model, optimizer, criterion, loader = private(Net(flattened), mode, 4, privacy_unit="users")
    x, y = inputs()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as parts:
        for _, rows in zip(parts, ([0, 1], [2, 3]), strict=True):
            if clear == "first":
                optimizer.zero_grad()
            out = model(x[rows], users=users[rows])
            if clear == "between":
                optimizer.zero_grad()
            criterion(out, y[rows]).backward()
            optimizer.step()
            got = [p.grad.clone() for p in optimizer.params if p.grad is not None]
            if clear == "last":
                optimizer.zero_grad()
    return got


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clear", ["first", "between", "last"])
def test_units_are_those_of_the_step_wherever_gradients_are_cleared(clear: str, mode: str) -> None:
    with pytest.raises(RuntimeError, match=r"rows of the units \[7\]"):
        by_parts(mode, clear, torch.tensor([7, 3, 7, 9]))
    want = clipped_sum(Net(flattened), *inputs(), [torch.tensor(r) for r in ([0, 1], [2], [3])])
    assert_right(by_parts(mode, clear, torch.tensor([7, 7, 3, 9])), want)


@pytest.mark.parametrize("mode", MODES)
def test_forward_passes_before_the_first_step_are_batches_of_their_own(mode: str) -> None:
    model, optimizer, criterion, _ = private(Net(flattened), mode, privacy_unit="users")
    x, y = inputs()
    parts = [[0, 1], [2, 4]]  # rows of 7 and 3 in both
    outputs = [model(x[rows], users=USERS[rows]) for rows in parts]
    optimizer.signal_skip_step(True)
    criterion(outputs[0], y[parts[0]]).backward()
    optimizer.step()
    optimizer.signal_skip_step(False)
    criterion(outputs[1], y[parts[1]]).backward()
    with pytest.raises(RuntimeError, match=r"rows of the units \[3, 7\]"):
        optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_reentrant_checkpoints_run_layers_again_on_rows_of_the_latest_call(mode: str) -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        inner = partial(checkpoint, partial(flattened, net), use_reentrant=True)
        return checkpoint(inner, x, use_reentrant=True)

    made = private(Net(use), mode, 3, privacy_unit="users")
    model, optimizer, criterion, _ = made
    x, y = inputs()
    x.requires_grad_()
    want = clipped_sum(Net(flattened), x.detach(), y, OF_USERS)
    assert_right(step(made, x, y, users=USERS), want)
    assert not any(g.any() for g in step(made, x[:0], y[:0], users=USERS[:0]))
    first = model(x, users=USERS)
    model(x, users=USERS.flip(0))
    with pytest.raises(ValueError, match="reentrant checkpoint runs layers again"):
        criterion(first, y).backward()
    optimizer.reset_accumulation()
    assert_right(step(made, x, y, users=USERS), want)


@dataclass
class Held:
    logits: Tensor


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("wrap", [lambda logits: logits, Held])
def test_reentrant_checkpoints_run_layers_again_on_rows_that_the_data_move(
    wrap: Any, mode: str
) -> None:
    def in_order(net: Any, x: Tensor) -> Tensor:
        order = x.detach().norm(dim=(1, 2)).argsort()
        rows = checkpoint(lambda h: net.b(h).tanh(), net.a(x)[order], use_reentrant=True)
        return net.norm(rows)[order.argsort()].mean(1)

    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    made = private(Wrapped(in_order), mode)
    model, optimizer, criterion, _ = made

    def loss(seed: int) -> Tensor:
        x, y = inputs(seed)
        output = model(x)
        return criterion(getattr(output, "logits", output), y)

    for seed in (0, 1):
        optimizer.zero_grad()
        loss(seed).backward()
        optimizer.step()
        want = clipped_sum(
            Net(lambda net, x: net.norm(net.b(net.a(x)).tanh()).mean(1)),
            *inputs(seed),
            list(torch.arange(B)[:, None]),
        )
        assert_right([p.grad for p in optimizer.params], want)
    optimizer.zero_grad()
    first, _ = loss(0), loss(1)
    with pytest.raises(ValueError, match="reentrant checkpoint runs layers again"):
        first.backward()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_losses_of_different_units_are_not_added(mode: str) -> None:
    """Those of other rows of the same units are."""
    made = private(Net(flattened), mode, 3, privacy_unit="users")
    model, optimizer, criterion, _ = made
    x, y = inputs()

    def backward(*batches: list[int]) -> None:
        optimizer.zero_grad()
        sum(criterion(model(x[rows], users=USERS[rows]), y[rows]) for rows in batches).backward()

    with pytest.raises(ValueError, match="rows of different units"):
        backward([0, 1], [2, 3])
    backward([0, 1], [2, 4])
    optimizer.step()
    members = [torch.tensor([1, 4]), torch.tensor([0, 2])]
    assert_right([p.grad for p in optimizer.params], clipped_sum(Net(flattened), x, y, members))


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


KINDS = [torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", KINDS)
def test_names_are_integers_of_any_kind(dtype: torch.dtype) -> None:
    x, y = inputs()
    names = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    if dtype == torch.int64:
        names = names + 2**62
    got = step(private(Net(flattened), "ghost_bk", 2, privacy_unit="users"), x, y, users=names)
    members = [torch.tensor([0, 2]), torch.tensor([1, 3, 4])]
    assert_right(got, clipped_sum(Net(flattened), x, y, members))


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
