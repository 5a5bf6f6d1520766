"""A model whose steps can be made to fail at a chosen place, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.norms.ledger import NormLedger
from opacus.core.ranks.parallelism import Single
from opacus.core.rules.linear import LinearRule
from tests.helpers import oracle

B, CLIP = 6, 0.5
DP = ["hooks", "functorch", "ew", "ghost", "ghost_bk", "flash", "flash_bk"]
# Places of a step, in their order.
OF_ALL = [
    "forward", "inside a layer", "interrupted", "loss", "backward", "out of memory",
    "coupled", "coupled; backward", "noise",
]  # fmt: skip
OF_RULES = ["refused in backward"]
OF_GHOST = [
    "norms", "criterion refused", "criterion refused; backward", "coupled; norms",
    "changed gradients",
]  # fmt: skip


class Fault:
    """Where the next step fails: nowhere, at a place, or at two."""

    at: ClassVar[list[str]] = []


class Error(Exception):
    """What a step fails with."""


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if "backward" in Fault.at:
            raise Error("backward")
        if "out of memory" in Fault.at:
            raise torch.OutOfMemoryError("out of memory")
        return grad


class Inner(nn.Linear):
    """A layer whose own forward may fail."""

    def forward(self, x: Tensor) -> Tensor:
        if "inside a layer" in Fault.at:
            raise Error("inside a layer")
        if "interrupted" in Fault.at:
            raise KeyboardInterrupt
        return super().forward(x)


class Model(nn.Module):
    """Three layers, of which the second is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 6), Inner(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if "forward" in Fault.at:
            raise Error("forward")
        if "coupled" in Fault.at:
            x = x * (1 + x.detach().square().sum().item())
        return self.head(torch.tanh(self.second(_Fuse.apply(x))))  # type: ignore[no-untyped-call]


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(seed: int, rows: int = B) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=draw) * 3, torch.randint(0, 3, (rows,), generator=draw)


class Loss(nn.CrossEntropyLoss):
    """Cross-entropy that may fail, or mix samples."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if "loss" in Fault.at:
            raise Error("loss")
        losses = super().forward(output, target)
        return losses / losses.detach().sum() if "criterion refused" in Fault.at else losses


@contextmanager
def failing(at: str) -> Iterator[None]:
    """Within it, steps fail at a place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fault, "at", at.split("; "))
        if "norms" in Fault.at:
            patch.setattr(NormLedger, "finish", _fail)
        if "refused in backward" in Fault.at:
            patch.setattr(LinearRule, "per_sample_grad", _fail)
            patch.setattr(LinearRule, "norm_sq", _fail)
        if "noise" in Fault.at:
            patch.setattr(Single, "noised", _fail)
        yield


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise Error("in the package")


def want(model: nn.Module, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Clipped sum, a sample at a time in float64."""

    def loss(model: nn.Module, sample: Any) -> Tensor:
        return nn.functional.cross_entropy(model(sample[0]), sample[1])

    return list(oracle.clipped_sum(oracle.per_sample_gradients(model, loss, data), CLIP).values())


class Training:
    """A private model without noise."""

    def __init__(self, mode: str, model: nn.Module | None = None, **how: Any) -> None:
        self.net = build() if model is None else model
        self.engine = PrivacyEngine()
        given: dict[str, Any] = {
            "module": self.net,
            "optimizer": torch.optim.SGD(self.net.parameters(), lr=0.0),
            "criterion": Loss(reduction="sum"),
            "data_loader": DataLoader(TensorDataset(*batch(9, 2 * B)), batch_size=B),
            "noise_multiplier": 0.0,
            "max_grad_norm": CLIP,
            "poisson_sampling": False,
            "loss_reduction": "sum",
            "grad_sample_mode": mode,
        }
        made = self.engine.make_private(**{**given, **how})
        self.model, self.optimizer = made[:2]
        self.criterion = made[2] if len(made) == 4 else Loss(reduction="sum")
        self.loader = made[-1]

    def backward(self, data: tuple[Tensor, Tensor]) -> None:
        self.criterion(self.model(data[0]), data[1]).backward()

    def step(self, data: tuple[Tensor, Tensor]) -> None:
        self.backward(data)
        if "changed gradients" in Fault.at:
            for parameter in self.net.parameters():
                parameter.grad.mul_(2)
        self.optimizer.step()

    @property
    def steps(self) -> int:
        """That the accountant counts."""
        return len(self.engine.accountant)
