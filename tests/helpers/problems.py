"""Models with a batch and a per-sample loss, as data for the tests of every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opacus.grad_sample import register_grad_sampler


@dataclass(frozen=True)
class Problem:
    """A model, its inputs and targets; the loss is one number a sample."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    targets: Callable[[int], Tensor]
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss

    def batch(self, size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return self.inputs(size), self.targets(size)


class SequenceLoss(nn.Module):
    """Mean cross-entropy over the tokens of each sequence."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
        return losses if self.reduction == "none" else losses.mean()


class InPlace(nn.Module):
    """In-place operations right after tapped layers, and a residual added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.first(x))
        g = self.second(h)
        g += h
        return self.head(g)


class Checkpointed(nn.Module):
    """Two blocks under activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(6, 6)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Reused(nn.Module):
    """One layer applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.layer(x)))
        return self.head(self.norm(self.layer(x)))


class LanguageModel(nn.Module):
    """Token and position tables, a head that may share the token table's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Embedding(7, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.tokens(ids) + self.positions(places)
        return self.head(x + self.mlp(x))


class OwnParameters(nn.Module):
    """A custom layer with parameters of its own around another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.shift = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(self.inner(x) * self.scale) + self.shift)


class Transposed(nn.Module):
    """A custom linear layer with its weight ``[d, p]``, and a sampler that returns transposes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t())


@register_grad_sampler(Transposed)
def _transposes(layer: Transposed, activations: Any, backprops: Tensor) -> dict[Any, Tensor]:
    return {layer.weight: torch.einsum("bp,bd->bpd", backprops, activations[0]).transpose(1, 2)}


class Channels(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


def _vectors(size: int) -> Tensor:
    return torch.randn(size, 6) * 3


def _classes(size: int) -> Tensor:
    return torch.randint(0, 3, (size,))


def _tokens(size: int) -> Tensor:
    return torch.randint(0, 11, (size, 7))


def _vector_problem(model: Callable[[], nn.Module]) -> Problem:
    return Problem(model, _vectors, _classes)


def _token_problem(model: Callable[[], nn.Module]) -> Problem:
    return Problem(model, _tokens, _tokens, SequenceLoss)


PROBLEMS: dict[str, Problem] = {
    "mlp": _vector_problem(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))
    ),
    "in_place": _vector_problem(InPlace),
    "frozen": _vector_problem(_frozen),
    "checkpoint": _vector_problem(lambda: Checkpointed(reentrant=False)),
    "checkpoint_reentrant": _vector_problem(lambda: Checkpointed(reentrant=True)),
    "reused": _vector_problem(Reused),
    "own_parameters": _vector_problem(OwnParameters),
    "transposed": _vector_problem(
        lambda: nn.Sequential(Transposed(6, 8), nn.Tanh(), nn.Linear(8, 3))
    ),
    "channels": Problem(Channels, lambda n: torch.randn(n, 2, 6, 6), _classes),
    "language": _token_problem(lambda: LanguageModel(tied=False)),
    "language_tied": _token_problem(lambda: LanguageModel(tied=True)),
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of a problem, always with the same weights for the same seed."""
    torch.manual_seed(seed)
    with torch.device("cpu"):  # the same weights on every device
        return PROBLEMS[name].model().to(dtype)


def criterion(name: str, reduction: str = "mean") -> Any:
    """The loss function of a problem."""
    return PROBLEMS[name].criterion(reduction=reduction)  # type: ignore[call-arg]


def per_sample(name: str, model: nn.Module, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    """Gradients of each sample by itself, by plain autograd, in the model's precision."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if inputs.is_floating_point():
        inputs = inputs.to(parameters[0].dtype)
    loss_fn, grads = criterion(name), []
    for i in range(len(inputs)):
        for p in parameters:
            p.grad = None
        loss_fn(model(inputs[i : i + 1]), targets[i : i + 1]).backward()
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    for p in parameters:
        p.grad = None
    return grads


def clipped_sum(grads: list[list[Tensor]], clip: float) -> tuple[list[Tensor], Tensor]:
    """Sum of the clipped gradients, and the norms ``[B]``."""
    norms = torch.stack([torch.sqrt(sum(g.square().sum() for g in grad)) for grad in grads])
    factors = (clip / (norms + 1e-6)).clamp(max=1)
    total = [
        sum(f * g for f, g in zip(factors, column, strict=True))
        for column in zip(*grads, strict=True)
    ]
    return total, norms
