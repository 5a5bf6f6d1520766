"""A model of blocks, with what it takes to compare steps in which they run again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers import oracle

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


def private(
    model: nn.Module, clip: Any, mode: str = "ghost_bk", data: Any = None, **how: Any
) -> tuple[Any, ...]:
    data = batch() if data is None else data
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        loss_reduction="sum",
        data_loader=DataLoader(TensorDataset(*data), batch_size=len(data[0])),
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
    return {name: choice.what for name, choice in model._strategy.planner.report.choices.items()}


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


def full(tensor: Any) -> Tensor:
    """The whole of a sharded tensor."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
