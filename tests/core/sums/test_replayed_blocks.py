"""Blocks that run again for the clipped sum, where a budget leaves no room for their records."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.kernels.norms import reference
from opacus.core.norms.kept import Kept
from opacus.core.norms.ledger import SquaredNorms
from opacus.core.sums import choice as choosing
from opacus.core.sums import planner as planner_module
from opacus.core.sums.planner import Planner
from opacus.core.sums.rates import Rates
from opacus.core.sums.terms import KeptSums
from tests.helpers import oracle
from tests.helpers.replayed_blocks import (
    B,
    Block,
    D,
    Net,
    T,
    batch,
    build,
    close,
    expected,
    loss_of,
    private,
    step,
    ways,
)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("mode", ["ghost_bk", "flash_bk"])
def test_every_mixture_is_exact(mode: str, checkpoints: bool) -> None:
    model = build(checkpoints=checkpoints)
    clip, want = expected(model)
    made = private(model, clip, mode)
    counts = []
    for budget in (None, 1 << 30, 40_000, 28_000, 0, None):
        made[0].held_budget = budget
        close(step(made), want)
        counts.append(sum(way == "replay" for way in ways(made[0]).values()))
        assert made[0].per_sample_gradient_norms.shape == (B,)
    assert counts[0] == counts[1] == counts[5] == 0
    assert 0 < counts[2] < counts[3] <= counts[4] == 4 * 3
    assert "replay" in made[0].explain() or made[0].held_budget is None


def test_held_bytes_stay_in_the_budget() -> None:
    """Of what is held inside of blocks; a replayed one keeps its input and a gradient."""
    made = private(build(), 0.1)
    made[0].held_budget = 1 << 30
    step(made)
    planner = made[0]._strategy.planner
    whole = planner.held_bytes
    for budget in (whole, whole // 2):
        made[0].held_budget = budget
        step(made)
        last = planner.report.choices["stem"]  # outside of the blocks, and after them
        assert planner.held_bytes - last.bytes[last.what] <= budget
    assert "replay" in ways(made[0]).values()
    assert planner.blocks.chosen == []  # nothing outlives the sum


def test_steps_like_one_that_had_room_are_not_looked_at() -> None:
    model = build()
    clip, want = expected(model)
    made = private(model, clip)
    planner, (x, y) = made[0]._strategy.planner, batch()
    made[0].held_budget = 1 << 30
    close(step(made), want)
    assert planner.looks
    whole = planner.held_bytes
    made[0].held_budget = whole
    for data, looks in (
        ((x, y), False),
        ((x[:2], y[:2]), False),
        ((torch.cat([x, x]), torch.cat([y, y])), True),
        ((x, y), False),
    ):
        made[2](made[0](data[0]), data[1]).backward()
        assert planner.looks is looks, len(data[0])
        made[1].zero_grad()
    made[0].held_budget = whole // 2
    close(step(made), want)
    assert planner.looks and "replay" in ways(made[0]).values()


def test_as_many_blocks_are_held_as_the_peak_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose memory has the model, what a block's backward needs, and what is held."""
    model_bytes, inside = 10_000, 3_000
    made = private(build(), 0.1)
    planner = made[0]._strategy.planner

    def in_use() -> int:
        given = planner.blocks.waiting * B * T * D * 8  # checkpoints' inputs
        return model_bytes + inside + planner.held_bytes + given

    monkeypatch.setattr(planner_module, "in_use", in_use)
    held = {}
    for limit in range(38_000, 71_000, 3_000):
        made[0]._strategy.limits.peak = limit
        made[0]._limited()
        for _ in range(2):
            step(made)
        last = planner.report.choices["stem"]  # after all blocks: nothing else can be held instead
        at_start = planner._base + planner.held_bytes - last.bytes[last.what] + planner._in_sum
        blocks = 4 - sum(way == "replay" for way in ways(made[0]).values()) // 3
        held[blocks] = at_start
        known = [b.held_before for b in planner.blocks.found if b.held_before]
        if known and blocks < 4:
            more = next(iter(known[-1].values())) - 2 * B * T * D * 8  # held, and not replayed
            assert blocks == 0 or at_start <= limit < at_start + 2 * more, limit
    assert sorted(held) == [0, 1, 2, 3, 4]
    assert sorted(held.values()) == [held[blocks] for blocks in range(5)]


def test_norms_that_are_taken_together_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is not looked at takes several at once, with as many Gram matrices."""
    monkeypatch.setattr(choosing, "rates_of", lambda *place: Rates(multiply_adds=1e18, bytes=1e9))
    monkeypatch.setattr(planner_module, "in_use", lambda: 10_000)
    stacks: list[int] = []
    of_products = reference._of_products

    def noting(left: Tensor, right: Tensor, *given: Any, **how: Any) -> Tensor:
        stacks.append(left.nbytes + right.nbytes)
        return of_products(left, right, *given, **how)

    monkeypatch.setattr(reference, "_of_products", noting)
    made = private(build(), 0.1)
    planner = made[0]._strategy.planner
    made[0]._strategy.limits.peak = 1 << 30
    made[0]._limited()
    step(made)
    looked_at = planner.report.predicted_peak
    assert planner.looks and set(ways(made[0]).values()) >= {"keep"}
    stacks.clear()
    step(made)
    assert not planner.looks and max(stacks) == 8 * 2 * B * T * T * 8  # two layers of each block
    assert planner.report.predicted_peak == looked_at + max(stacks)
    limit = planner.report.predicted_peak
    for room, looks in ((0, False), (1, True)):
        made[0]._strategy.limits.peak = limit - room
        step(made)
        assert planner.looks is looks


def test_nothing_is_formed_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known how much is held of a block, one that has no room is never begun."""
    model = build()
    clip, want = expected(model)
    made = private(model, clip)
    dropped: list[int] = []
    original = Kept.drop

    def drop(self: Kept, *given: Any) -> dict[str, Tensor]:
        squares = original(self, *given)
        dropped.append(len(squares))
        return squares

    monkeypatch.setattr(Kept, "drop", drop)
    made[0].held_budget = 1 << 30
    step(made)
    whole = made[0]._strategy.planner.held_bytes
    in_vain = {}
    for budget in range(whole // 3, whole, whole // 12):
        made[0].held_budget = budget
        dropped.clear()
        close(step(made), want)
        in_vain[budget] = sum(dropped)
    assert len(dropped) >= 3 and not any(in_vain.values())


def test_dropout_and_samples_that_are_not_finite() -> None:
    x, y = batch()
    sums = []
    for budget in (None, 0):
        made = private(build(dropout=0.4), 0.2)
        made[0].held_budget = budget
        torch.manual_seed(5)
        sums.append(step(made))
        torch.manual_seed(6)
        broken = x.clone()
        broken[2, 1] = torch.nan
        sums.append(step(made, (broken, y)))
    close(sums[2], sums[0])
    close(sums[3], sums[1])
    assert all(bool(g.isfinite().all()) for g in sums[1].values())
    assert any(not torch.equal(sums[0][n], sums[1][n]) for n in sums[0])


def test_empty_batches_and_clipping_by_layer() -> None:
    model = build()
    made = private(model, [0.05] * len(list(model.parameters())), clipping="per_layer")
    sums = []
    for budget in (None, 0):
        made[0].held_budget = budget
        sums.append(step(made))
    close(sums[1], sums[0])
    x, y = batch()
    assert all(bool((g == 0).all()) for g in step(made, (x[:0], y[:0])).values())


@pytest.mark.parametrize("place", ["norms", "sum"])
def test_after_running_out_of_memory_a_block_more_runs_again(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    clip, want = expected(model)
    made = private(model, clip)
    made[0].held_budget = 1 << 30
    close(step(made), want)
    owner, name = (SquaredNorms, "take") if place == "norms" else (KeptSums, "_weighted")
    original, calls = getattr(owner, name), []

    def fails(self: Any, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 7:
            raise torch.OutOfMemoryError("planted")
        return original(self, *given)

    counts, counted = [], len(made[1]._counters[0].accountant.history)
    # Few records are kept, and their norms computed, where gradients are stored.
    monkeypatch.setattr(Planner, "_choice", lambda self, record: keeping(self, record))
    for _ in range(2):
        calls.clear()
        with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
            patched.setattr(owner, name, fails)
            step(made)
        assert all(p.grad is None for p in model.parameters())
        assert made[0]._strategy.planner.blocks.chosen == []
        with pytest.raises(RuntimeError, match="no clipped gradient"):
            made[1].step()
        close(step(made), want)
        counts.append(sum(way == "replay" for way in ways(made[0]).values()) // 3)
    assert 1 <= counts[0] < counts[1]
    assert sum("a block more runs again" in r.message for r in caplog.records) == 2
    history = made[1]._counters[0].accountant.history
    assert sum(steps for *_, steps in history) == counted + 2  # nothing failed was released
    made[0].held_budget = None
    close(step(made), want)
    assert "replay" not in ways(made[0]).values()


_CHOICE = Planner._choice


def keeping(planner: Planner, record: Any) -> Any:
    return replace(_CHOICE(planner, record), what="keep")


class Counting(Block):
    """Computes something else each time."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.runs = getattr(self, "runs", 0) + 1
        return super().forward(x * self.runs, scale)


class Forgetting(Block):
    """Leaves out a layer the second time."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.runs = getattr(self, "runs", 0) + 1
        return super().forward(x, scale) if self.runs == 1 else self.down(self.up(x))


@pytest.mark.filterwarnings("ignore:OPACUS_ISOLATION_CHECK=0")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, r"'blocks\.2\..*held_budget"),
        (Forgetting, r"layer 'blocks\.2\.norm' computed something else"),
    ],
)
def test_a_block_that_does_something_else_is_an_error(
    kind: type[Block], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    model = build()
    model.blocks[2] = kind().double()
    made = private(model, 0.1)
    made[0].held_budget = 0
    with pytest.raises(RuntimeError, match=message):
        step(made)
    assert all(p.grad is None for p in model.parameters())


class Watched(torch.autograd.Function):
    """Twice its input, and counts who asks for the gradient of that."""

    asked = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Watched.asked += 1
        return 2 * grad


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.filterwarnings("ignore:OPACUS_ISOLATION_CHECK=0")
def test_no_gradient_of_what_a_block_is_given_is_formed_again(
    checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubling(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(Watched.apply(x), scale)

    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    model = build(checkpoints=checkpoints)
    model.blocks[2] = Doubling().double()
    clip, want = expected(model)
    made = private(model, clip)
    made[0].held_budget = 0
    Watched.asked = 0
    close(step(made), want)
    assert "replay" in ways(made[0]).values() and Watched.asked == 1


def test_what_a_block_was_given_may_not_change() -> None:
    model = build()

    class Changing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            output: Tensor = self.inner(x.clone())
            with torch.no_grad():
                x.mul_(2)
            return output

    model.blocks[2] = Changing(model.blocks[2])
    made = private(model, 0.1)
    made[0].held_budget = 0
    with pytest.raises(RuntimeError):
        step(made)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_blocks_that_cannot_run_alone_are_kept() -> None:
    model = build()
    model.blocks[3].down.weight = model.blocks[1].down.weight  # tied
    model.blocks[0].compile(backend="eager")
    clip, want = expected(build_like(model))
    made = private(model, clip)
    made[0].held_budget = 0
    close(step(made), want)
    replayed = {name for name, way in ways(made[0]).items() if way == "replay"}
    assert {name.split(".")[1] for name in replayed} == {"2"}


def build_like(model: Net) -> Net:
    other = build()
    other.blocks[3].down.weight = other.blocks[1].down.weight
    other.load_state_dict(model.state_dict())
    return other


class OwnTables(nn.Module):
    """A block with positions of its own, computed once for all samples, and tokens as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.norm = nn.Embedding(T, D), nn.LayerNorm(D)
        self.rows, self.last = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = x + self.norm(self.places(torch.arange(x.shape[1])))
        x = x + torch.tanh(self.rows(x.flatten(0, 1)).view(x.shape))
        return self.last(x)


@pytest.mark.parametrize("length", [B, T])
def test_what_a_block_shares_or_moves_is_kept(length: int) -> None:
    """Also with as many samples as positions: their factors are not those of the positions."""
    model = build()
    model.blocks = nn.ModuleList(OwnTables() for _ in range(2)).double()
    x, y = batch()
    data = x[:, :length], y
    grads = oracle.per_sample_gradients(model, loss_of, data)
    clip = 0.5 * float(oracle.norms(grads).min())
    made = private(model, clip, data=data)
    made[0].held_budget = 0
    close(step(made, data), oracle.clipped_sum(grads, clip))
    found = ways(made[0])
    assert {found[f"blocks.{i}.last"] for i in range(2)} == {"replay"}
    assert "replay" not in {found[f"blocks.{i}.{n}"] for i in range(2) for n in ("norm", "rows")}


def test_a_budget_keeps_no_model_alive() -> None:
    made = private(build(), 0.1)
    made[0].held_budget = 0
    step(made)
    seen = weakref.ref(made[0].blocks[0])
    copied = copy.deepcopy(made[0])
    del made
    assert seen() is None or gc.collect() >= 0  # what torch itself keeps in circles
    gc.collect()
    assert seen() is None
    assert copied._strategy.planner.blocks.found[0].module is copied._module.blocks[0]


def test_nothing_of_a_block_is_held_after_the_backward_pass() -> None:
    """What the first block was given, say, whose graph is none of a copy's either."""
    given: list[weakref.ref[Tensor]] = []
    made = private(build(), 0.1)
    made[0].held_budget = 1 << 30
    model = made[0]._module
    model.blocks[0].register_forward_pre_hook(lambda _, args: given.append(weakref.ref(args[0])))
    step(made)  # units are run alone, too
    assert made[0]._strategy.planner.blocks is not None
    assert given and not [ref for ref in given if ref() is not None]
    copy.deepcopy(made[0])


def test_backward_passes_before_the_one_of_a_step() -> None:
    """For gradients of inputs, or of the same losses on a graph that stays; none is in the sum."""
    net = build()
    clip, want = expected(net)
    made = private(net, clip)
    made[0].held_budget = 0
    model, optimizer, criterion = made[:3]
    x, y = batch()
    output = model(x.requires_grad_())
    torch.autograd.grad(output.logsumexp(1).sum(), x, retain_graph=True)
    losses = criterion(output, y)
    losses.backward(retain_graph=True)
    optimizer.zero_grad()
    losses.backward()
    close({n.removeprefix("_module."): p.grad for n, p in model.named_parameters()}, want)


class Routed(nn.Module):
    """A block with an expert that gets the tokens above a threshold: one, of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expert, self.last = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.threshold = 0.0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        (chosen,) = torch.where(tokens.detach()[:, 0] >= self.threshold)
        moved = torch.zeros_like(tokens).index_add(0, chosen, self.expert(tokens[chosen]))
        output: Tensor = self.last(x + moved.view(x.shape))
        return output


def test_an_expert_with_one_token_in_a_block_that_runs_again() -> None:
    model = build()
    model.blocks = nn.ModuleList([Routed()]).double()
    with torch.no_grad():
        model.blocks[0].threshold = float(
            model.blocks[0].norm(model.stem(batch()[0]))[..., 0].max()
        )
    grads = oracle.per_sample_gradients(model, loss_of, batch())
    assert (grads["blocks.0.expert.bias"].flatten(1).norm(dim=1) > 0).sum() == 1
    clip = float(oracle.norms(grads).median())
    made = private(model, clip)
    made[0].held_budget = 0
    close(step(made), oracle.clipped_sum(grads, clip))
    assert ways(made[0])["blocks.0.last"] == "replay"
