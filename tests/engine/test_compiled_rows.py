"""Compiled models that move or mix samples: found out, or right, whenever they were compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn

from opacus import IsolationError, PrivacyEngine
from tests.helpers.graphs import Move, fresh_graphs, time_first, turned

B, T, D = 4, 5, 8
C = 0.01

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with fresh_graphs(), torch._functorch.config.patch(donated_buffer=False):
        yield


def in_order(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def in_one_line(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.reshape(-1, D)).view(x.shape)  # type: ignore[no-any-return]


def mixed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(0.9 * x + 0.1 * x.roll(1, 0))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, move: Move) -> None:
        super().__init__()
        self.layer, self.move = nn.Linear(D, D), move

    def forward(self, x: Tensor) -> Tensor:
        return self.move(self.layer, x) + 0 * getattr(self, "rate", 0)


class Net(nn.Module):
    def __init__(self, move: Move) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(6, D), Block(move), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.block(self.first(x))).mean(1))
        return output


def batch() -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([0.1, 1, 3, 9]).view(B, 1, 1)
    x = torch.randn(B, T, 6, generator=torch.Generator().manual_seed(1)) * sizes
    return x, torch.arange(B) % 3


def private(net: nn.Module, mode: str) -> Any:
    made: Any = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(torch.zeros(8, 6), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=C,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    return (*made[:2], made[2] if len(made) == 4 else nn.CrossEntropyLoss())


def step(made: Any, model: Any = None) -> Tensor:
    """What a step releases."""
    x, y = batch()
    made[1].zero_grad()
    made[2]((made[0] if model is None else model)(x), y).backward()
    made[1].step()
    return torch.cat([p.grad.flatten() for p in made[0].parameters()])


def wanted(move: Move) -> Tensor:
    """The same in fp64: a sample at a time, by plain autograd."""
    net, (x, y) = Net(move).double(), batch()
    total: Any = 0
    for i in range(B):
        loss = nn.functional.cross_entropy(net(x[i : i + 1].double()), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(net.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        total += flat * min(1.0, C / float(flat.norm())) / B
    return total  # type: ignore[no-any-return]


def before(net: nn.Module, mode: str) -> tuple[Any, Any]:
    net.compile(backend="aot_eager")
    return private(net, mode), None


def after(net: nn.Module, mode: str) -> tuple[Any, Any]:
    made = private(net, mode)
    return made, torch.compile(made[0], backend="aot_eager")


def inside(net: nn.Module, mode: str) -> tuple[Any, Any]:
    made = private(net, mode)
    net.compile(backend="aot_eager")
    return made, None


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("compiled", [before, after, inside])
def test_a_model_compiled_as_a_whole_is_checked(compiled: Any, mode: str) -> None:
    made, model = compiled(Net(in_order), mode)
    for _ in range(2):
        torch.testing.assert_close(
            step(made, model).double(), wanted(in_order), rtol=1e-4, atol=1e-7
        )
    assert made[0].isolation.schedule.checks > 0


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("compiled", [before, after, inside])
def test_a_model_compiled_as_a_whole_that_mixes_samples_is_refused(
    compiled: Any, mode: str
) -> None:
    made, model = compiled(Net(mixed), mode)
    with pytest.raises((IsolationError, ValueError), match=r"not its own|of no single sample"):
        step(made, model)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("move", [in_order, turned, in_one_line, time_first])
def test_a_block_that_is_compiled_later_has_the_rows_that_were_found(move: Move, mode: str) -> None:
    net = Net(move)
    made, want = private(net, mode), wanted(move)
    for number in range(6):
        if number == 3:
            net.block.compile(backend="aot_eager")
        torch.testing.assert_close(step(made).double(), want, rtol=1e-4, atol=1e-7)


def test_graphs_that_are_made_later_are_checked_however_many_there_are() -> None:
    net = Net(in_order)
    net.block.compile(backend="aot_eager")
    made = private(net, "ghost_bk")
    for number in range(20):
        net.block.rate = number  # a graph for each
        step(made)
    net.block.move = turned
    with pytest.raises(IsolationError, match="is not its own"):
        step(made)
