"""A model whose gradients autograd carries, with the oracle's sums, in one process or FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opacus.core.ranks.carried_layers
import opacus.core.sums.choice
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.lone_sample import C, private
from tests.helpers.sharded import full

ROWS, TOKENS = 3, 5
STEPS = 3  # learnt from, followed once more, carried


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it, and a bias."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.base = nn.Linear(d, p).requires_grad_(False)
        self.a, self.b = nn.Linear(d, 2, bias=False), nn.Linear(2, p)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.b(self.a(x))
        return self.base(x) + added


class Hidden:
    """How a block runs, where a model's settings are not looked for: passes stay as they are."""

    __slots__ = ("reads", "uses")

    def __init__(self, uses: int) -> None:
        self.uses, self.reads = uses, 0


class Block(nn.Module):
    def __init__(self, reused: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), Adapted(8, 6), Adapted(6, 8)
        self.hidden = Hidden(1 + reused)

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden.reads:
            x = x + self.up.b.weight.sum()
        for _ in range(self.hidden.uses):
            x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x


class Net(nn.Module):
    def __init__(self, reused: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(False), Block(reused)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        output: Tensor = self.head(x.mean(1))
        return output


def batch(rows: int, seed: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, tokens, 4, generator=random) * 2
    return x, torch.randint(0, 3, (rows,), generator=random)


def wanted(net: nn.Module, x: Tensor, y: Tensor, views: int = 1) -> tuple[list[Tensor], Tensor]:
    """Clipped sums and norms in fp64: a sample at a time, by plain autograd."""
    held = [p for p in net.parameters() if p.requires_grad]
    sums, norms = [torch.zeros_like(p) for p in held], []
    for row in range(len(x)):
        losses = [
            nn.functional.cross_entropy(
                net(x[row : row + 1].double() * (view + 1)), y[row : row + 1]
            )
            for view in range(views)
        ]
        grads = torch.autograd.grad(sum(losses), held)  # type: ignore[arg-type]
        norms.append(torch.cat([g.flatten() for g in grads]).norm())
        for total, grad in zip(sums, grads, strict=True):
            total += grad * min(1.0, C / float(norms[-1]))
    return sums, torch.stack(norms)


class Case:
    """A private model, its fp64 twin, and how many layers had records."""

    def __init__(
        self,
        reused: bool = False,
        compiled: bool = False,
        checkpoints: bool = False,
        mode: str = "ghost_fsdp_bk",
        **how: Any,
    ) -> None:
        torch.manual_seed(5)
        net = Net(reused, checkpoints)
        self.double = Net(reused).double()
        self.double.load_state_dict(net.state_dict())
        for block in net.blocks if compiled else ():
            block.compile(backend="aot_eager")
        self.model = FSDP2Wrapper(net) if "fsdp" in mode else net
        self.module, self.optimizer, self.loss = private(
            self.model,
            mode,
            nn.CrossEntropyLoss(reduction="sum"),
            batch(8, 0),
            loss_reduction="sum",
            **how,
        )
        self.records: list[str] = []
        sink = self.module._recorder.sink

        def noting(record: Any) -> None:
            self.records.append(record.spec.name)
            sink(record)

        self.module._recorder.sink = noting

    def error(
        self,
        rank: int,
        world_size: int,
        seed: int,
        views: int = 1,
        rows: int = ROWS,
        tokens: int = TOKENS,
    ) -> float:
        """Worst error of a step's sums, after its norms have been compared, too."""
        self.records.clear()
        x, y = batch(rows * world_size, seed, tokens)
        own = slice(rows * rank, rows * (rank + 1))
        sums, norms = wanted(self.double, x, y, views)
        assert (norms > 2 * C).all()
        losses = sum(self.loss(self.module(x[own] * (v + 1)), y[own]) for v in range(views))
        losses.backward()  # type: ignore[union-attr]
        assert (
            oracle.relative_error(self.module.per_sample_gradient_norms.double(), norms[own]) < 1e-5
        )
        held = [p for p in self.model.parameters() if p.requires_grad]
        found = [full(p.grad).double() for p in held]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return max(oracle.relative_error(f, s) for f, s in zip(found, sums, strict=True))


def prefer(what: str) -> None:
    """Let the planner ``"store"`` or ``"keep"`` all layers where both are possible."""
    opacus.core.sums.choice.KEEP_PASSES = 10**9 if what == "store" else 2
    opacus.core.sums.choice.STORE_PASSES = 10**9 if what == "keep" else 3
    opacus.core.ranks.carried_layers.OWN_WEIGHT_TOKENS = 1  # layers may have few tokens here
