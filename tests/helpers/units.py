"""Units of several rows: losses that mix them, and what is right for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers import oracle

B, T, D, CLIP = 5, 4, 6, 0.05


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


def routed(net: Any, x: Tensor) -> Tensor:
    """A mixture of two experts, by token, with as many tokens each as the data say."""
    flat = x.reshape(-1, D)
    out = torch.zeros_like(flat)
    chosen = (flat.detach()[:, 0] > 0.3).long()
    for number, expert in enumerate((net.a, net.b)):
        (some,) = torch.where(chosen == number)
        out.index_add_(0, some, expert(flat[some]).tanh() * 2)
    return net.norm(out.view(x.shape)).mean(1)


def joined(net: Any, x: Tensor) -> Tensor:
    first, second = net.a(torch.cat([x, x.flip(1)])).tanh().chunk(2)
    return (first * second).mean(1)


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
    losses = [
        sum(
            nn.functional.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
            for i in rows.tolist()
        )
        for rows in members
    ]
    return clipped(list(model.parameters()), losses)


def clipped(parameters: list[Any], losses: list[Any]) -> list[Tensor]:
    """The clipped sum of the gradients of units with these losses."""
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norms.append(float(torch.stack([g.norm() for g in found]).norm()))
        factor = min(1.0, CLIP / (norms[-1] + oracle.CLIPPING_EPS))
        total = [t + g * factor for t, g in zip(total, found, strict=True)]
    assert max(norms) > 2 * CLIP
    return total


def assert_right(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-4) -> None:
    error = torch.cat([(g.double() - w).flatten() for g, w in zip(got, want, strict=True)]).norm()
    assert error < tolerance * torch.cat([w.flatten() for w in want]).norm()
