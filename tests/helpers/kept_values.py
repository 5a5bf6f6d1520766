"""Models that keep something of a batch, and steps of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

B, D = 4, 5


class Net(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.register_buffer("mean", torch.zeros(D))
        self.code = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.state: Any = None
        self.queue: Any = deque(maxlen=2)
        self.size, self.sizes, self.array = 0.0, [1.0], np.zeros(D)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, x).tanh())


def running_mean(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.mean)
    net.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return out


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(B, D, generator=draw).double() * 3, torch.arange(B) % 3


def step(made: Any, x: Tensor, y: Tensor) -> None:
    model, optimizer, criterion, *_ = made
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()


def number(net: Any, x: Tensor) -> Tensor:
    """It changes little with each batch."""
    h = net.a(x)
    out = net.b(h * (1 + net.size))
    net.size = 0.99 * net.size + 0.01 * h.detach().abs().mean().item()
    return out


def written_numbers(net: Any, x: Tensor) -> Tensor:
    """What is for looking at, and a counter, by which all samples are scaled alike."""
    h = net.a(x)
    net.sizes.append(h.detach().abs().max().item())
    net.size += 1
    return net.b(h * (1 + net.size / 10))


def plain(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x).tanh())
