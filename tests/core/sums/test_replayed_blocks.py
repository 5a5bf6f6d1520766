"""Blocks that run again for the clipped sum, where a budget leaves no room for their records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests import oracle

B, T, D = 5, 6, 8


class Block(nn.Module):
    """A part of a transformer without its attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.down(self.drop(torch.tanh(self.up(self.norm(x)))))
        return x + (hidden if scale is None else hidden * scale)


class Net(nn.Module):
    """Blocks with or without checkpoints; the second one is given a keyword."""

    def __init__(self, checkpoints: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.stem = nn.Linear(4, D)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.blocks):
            more = {"scale": x.detach().mean(2, keepdim=True)} if place == 1 else {}
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=False, **more)
            else:
                x = block(x, **more)
        output: Tensor = self.head(x.mean(1))
        return output


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    scale = torch.linspace(0.3, 3, B).view(B, 1, 1)
    return (torch.randn(B, T, 4) * scale).double(), torch.randint(3, (B,))


def loss_of(model: nn.Module, data: Any) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1], reduction="none")


def private(model: nn.Module, clip: Any, mode: str = "ghost_bk", **how: Any) -> tuple[Any, ...]:
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        loss_reduction="sum",
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **how,
    )


def step(made: tuple[Any, ...], data: Any = None) -> dict[str, Tensor]:
    model, optimizer, criterion = made[:3]
    x, y = batch() if data is None else data
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    return {n.removeprefix("_module."): p.grad.clone() for n, p in model.named_parameters()}


def ways(model: Any) -> dict[str, str]:
    return {name: choice.what for name, choice in model._strategy.planner.choices.items()}


def build(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def expected(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    grads = oracle.per_sample_gradients(model, loss_of, batch())
    norms = oracle.norms(grads)
    clip = float(norms.median())
    assert (norms > 1.01 * clip).any() and (norms < 0.99 * clip).any()
    return clip, oracle.clipped_sum(grads, clip)


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, grad in got.items():
        assert oracle.relative_error(grad, want[name]) < 1e-10, name


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
        last = planner.choices["stem"]  # outside of the blocks, and after them
        assert planner.held_bytes - last.bytes[last.what] <= budget
    assert "replay" in ways(made[0]).values()
    assert planner.blocks.chosen == []  # nothing outlives the sum


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


class Counting(Block):
    """Computes something else each time."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.runs = getattr(self, "runs", 0) + 1
        return super().forward(x * self.runs, scale)


@pytest.mark.filterwarnings("ignore:OPACUS_ISOLATION_CHECK=0")
def test_a_block_that_computes_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    model = build()
    model.blocks[2] = Counting().double()
    made = private(model, 0.1)
    made[0].held_budget = 0
    with pytest.raises(RuntimeError, match=r"'blocks\.2\..*held_budget"):
        step(made)
    assert all(p.grad is None for p in model.parameters())


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
