"""What is compared: an optimizer, a way to clip and a kind of noise, under one name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from opacus.optimizers.adam import DPAdamW
from opacus.optimizers.filtered import DiSK
from opacus.optimizers.scaled import ScaledAdamW

Make = Callable[[Iterable[Any], float], Optimizer]


@dataclass(frozen=True)
class Contender:
    """One of them.

    Attributes:
        optimizer: name in the table.
        make: the optimizer of parameters and a learning rate.
        lrs: learning rates, of which the best on seed 0 is taken for the other seeds.
        clipping: as `make_private` takes it; ``None``: no privacy.
        noise: ``"independent"`` or ``"correlated"``.
        max_grad_norm: C, of the whole gradient.
    """

    optimizer: str
    make: Make
    lrs: tuple[float, ...]
    clipping: str | None = "flat"
    noise: str = "independent"
    max_grad_norm: float = 0.5


def _sgd(momentum: float) -> Make:
    return lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


_PLAIN, _HEAVY = (2.0, 8.0, 32.0), (0.5, 2.0, 8.0)
_ADAM = (0.002, 0.01, 0.05)

CONTENDERS = {
    "SGD": Contender("SGD", _sgd(0.0), _PLAIN),
    "momentum": Contender("SGD, momentum 0.9", _sgd(0.9), _HEAVY),
    "momentum, C / 10": Contender(
        "SGD, momentum 0.9", _sgd(0.9), (5.0, 20.0, 80.0), max_grad_norm=0.05
    ),
    "normalised": Contender("SGD, momentum 0.9", _sgd(0.9), _HEAVY, clipping="normalised"),
    "PSAC": Contender("SGD, momentum 0.9", _sgd(0.9), _HEAVY, clipping="psac"),
    "per layer": Contender(
        "SGD, momentum 0.9", _sgd(0.9), (8.0, 32.0, 128.0), clipping="per_layer"
    ),
    "Adam": Contender("Adam", lambda p, lr: torch.optim.Adam(p, lr=lr), _ADAM),
    "DPAdamW": Contender(
        "DPAdamW", lambda p, lr: DPAdamW(p, lr=lr, floor=1e-8), (0.0005, 0.002, 0.01)
    ),
    "ScaledAdamW": Contender("ScaledAdamW", lambda p, lr: ScaledAdamW(p, lr=lr), _ADAM),
    "DiSK, Adam": Contender("DiSK of Adam", lambda p, lr: DiSK(torch.optim.Adam(p, lr=lr)), _ADAM),
    "DiSK, momentum": Contender(
        "DiSK of SGD, momentum 0.9",
        lambda p, lr: DiSK(torch.optim.SGD(p, lr=lr, momentum=0.9)),
        _HEAVY,
    ),
    "correlated, SGD": Contender("SGD", _sgd(0.0), _PLAIN, noise="correlated"),
    "correlated, momentum": Contender("SGD, momentum 0.9", _sgd(0.9), _HEAVY, noise="correlated"),
    "not private": Contender("SGD, momentum 0.9", _sgd(0.9), (0.03, 0.125, 0.5), clipping=None),
}
