"""Runs with correlated noise, and what they have to end with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import CorrelatedNoise, PrivacyEngine
from opacus.core.privacy.noise import add_noise

ROWS, BATCHES, SIGMA, CLIP = 40, 4, 1.5, 0.05
PLAN = CorrelatedNoise.square_root(3, steps=12, separation=BATCHES)
BUFFERED = CorrelatedNoise((1.0,), 12, BATCHES, buffers=((-0.4, 0.4), (-0.05, 0.8)))
BANDED = CorrelatedNoise((1.0,), 12, 2, strategy=(1.0, 0.6))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.arange(ROWS) % 3)


class Run:
    """A private run, and the parts of the noise that its steps had."""

    def __init__(
        self,
        module: nn.Module,
        mode: str = "hooks",
        seed: int | None = 5,
        secure: bool = False,
        made_by: Callable[[Any], torch.optim.Optimizer] | None = None,
        **kw: Any,
    ) -> None:
        self.engine = PrivacyEngine(accountant="pld", secure_mode=secure)
        own = None if seed is None else torch.Generator().manual_seed(seed)
        split = None if seed is None else torch.Generator().manual_seed(7)
        self.made: Any = self.engine.make_private(
            module=module,
            optimizer=(made_by or partial(torch.optim.SGD, lr=0.5))(module.parameters()),
            grad_sample_mode=mode,
            noise_generator=own,
            **{
                "data_loader": DataLoader(data(), batch_size=ROWS // BATCHES, generator=split),
                "noise_multiplier": SIGMA,
                "max_grad_norm": CLIP,
                "correlated_noise": PLAN,
                **kw,
            },
        )
        self.model, self.optimizer, self.loader = self.made[0], self.made[1], self.made[-1]
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.loss = self.made[2] if len(self.made) == 4 else nn.CrossEntropyLoss()

    def step(self, x: Tensor, y: Tensor) -> None:
        self.seen.append((x, y))
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()

    def train(self, passes: int = 3) -> list[Tensor]:
        """The batches' targets."""
        seen = []
        for _ in range(passes):
            for x, y in self.loader:
                self.step(x, y)
                seen.append(y)
        return seen

    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.optimizer.params]


def clipped_sum(
    module: nn.Module, x: Tensor, y: Tensor, scales: Sequence[float] = (1.0,) * 4
) -> list[Tensor]:
    """One sample at a time, by plain autograd; norms of gradients multiplied by scales."""
    parameters = list(module.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for row, target in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(nn.functional.cross_entropy(module(row), target), parameters)
        pairs = zip(scales, grads, strict=True)
        norm = math.sqrt(sum(s * s * float(g.square().sum()) for s, g in pairs))
        assert norm > CLIP
        for t, g in zip(total, grads, strict=True):
            t += g * CLIP / (norm + 1e-6)
    return total


def white(run: Run, number: int) -> list[Tensor]:
    """The draws of one step, of standard deviation 1."""
    layout, params = run.optimizer._parallelism, run.optimizer.params
    names, zeros = run.optimizer._noise_names(params), [torch.zeros_like(p) for p in params]
    for zero, name in zip(zeros, names, strict=True):
        add_noise(1.0, [(zero, zero, name)], layout.key, "noise", layout.secure_mode, number)
    return zeros


def reference(run: Run, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The weights after steps with these batches, in float64, the noise summed term by term."""
    module, plan = model(), run.optimizer.plan.correlated_noise
    drawn: list[list[Tensor]] = []
    for number, (x, y) in enumerate(batches):
        drawn.append(white(run, number))
        total = clipped_sum(module, x, y)
        for place, parameter in enumerate(module.parameters()):
            noise = sum(
                weight * drawn[number - age][place]
                for age, weight in enumerate(plan.coefficients[: number + 1])
            )
            step = total[place] + SIGMA * CLIP * plan.sensitivity * noise
            parameter.data -= 0.5 * step / (ROWS / BATCHES)
    return [p.detach() for p in module.parameters()]


# --- dense matrices ---


def toeplitz(weights: tuple[float, ...], steps: int) -> Tensor:
    """``[steps, steps]`` with the weights below each other."""
    matrix = torch.zeros(steps, steps, dtype=torch.float64)
    for age, weight in enumerate(weights[:steps]):
        matrix += weight * torch.diag(torch.ones(steps - age, dtype=torch.float64), -age)
    return matrix


def worst(plan: CorrelatedNoise) -> float:
    """The largest ``||C u||`` over all ways to take part, gradients of norm 1 of either sign."""
    inverse = torch.linalg.inv(toeplitz(plan.weights, plan.steps))
    found = 0.0
    for signs in itertools.product((-1.0, 0.0, 1.0), repeat=plan.steps):
        places = [place for place, sign in enumerate(signs) if sign]
        if all(b - a >= plan.separation for a, b in itertools.pairwise(places)):
            found = max(found, float((inverse @ torch.tensor(signs, dtype=torch.float64)).norm()))
    return found


def root(plan: CorrelatedNoise) -> float:
    return math.sqrt(math.fsum(plan.squared_errors()) / plan.steps)
