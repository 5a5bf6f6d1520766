"""Blocks compiled during training: rows keep the units that were found, or the step is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opacus import IsolationError
from tests.helpers.graphs import Move, fresh_graphs, time_first, turned
from tests.helpers.units import B, D, assert_right, clipped_sum, inputs, private, step

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with fresh_graphs(), torch._functorch.config.patch(donated_buffer=False):
        yield


def both_ways(layer: nn.Module, x: Tensor) -> Tensor:
    return turned(layer, layer(x))


class Block(nn.Module):
    def __init__(self, move: Move, inside: bool) -> None:
        super().__init__()
        self.layer, self.move, self.inside = nn.Linear(D, D), move, inside

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.move(self.layer, x)) + x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.inside else self.run(x)


class Net(nn.Module):
    """``where``: whether checkpoints are inside of the block, around it, or nowhere."""

    def __init__(self, move: Move, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around = where == "around"
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.block = Block(move, where == "inside")

    def forward(self, x: Tensor) -> Tensor:
        x, block = self.first(x), self.block
        x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        output: Tensor = self.head(x.mean(1))
        return output


def found(net: Net, mode: str = "ghost_bk", **kw: Any) -> Any:
    """Private, after three steps; the block is compiled then."""
    made = private(net, mode, **kw)
    users = {"users": torch.arange(B)} if kw else {}
    for _ in range(3):
        step(made, *inputs(), **users)
    net.block.compile(backend="aot_eager")
    return made


@pytest.mark.parametrize("where", ["nowhere", "inside", "around"])
@pytest.mark.parametrize("move", [turned, time_first])
def test_named_units_stay_with_their_rows(move: Move, where: str) -> None:
    net = Net(move, where)
    made = found(net, privacy_unit="users")
    for seed, users in enumerate(([0, 1, 0, -1, 1], [3, 3, 2, 2, 5])):
        (x, y), owner = inputs(seed), torch.tensor(users)
        members = [torch.where(owner == u)[0] for u in owner.unique() if u >= 0]
        want = clipped_sum(Net(move, where), x, y, members)
        assert_right(step(made, x, y, users=owner), want)


@pytest.mark.parametrize("move", [turned, time_first])
def test_moved_rows_that_a_checkpoint_around_the_graph_runs_again(move: Move) -> None:
    made, (x, y) = found(Net(move, "around")), inputs()
    want = clipped_sum(Net(move, "around"), x, y, list(torch.arange(B).split(1)))
    assert_right(step(made, x, y), want)


@pytest.mark.parametrize("named", [False, True])
def test_a_layer_used_on_several_rows_is_refused_in_such_a_checkpoint(named: bool) -> None:
    kw = {"privacy_unit": "users"} if named else {}
    made = found(Net(both_ways, "around"), **kw)
    with pytest.raises(RuntimeError, match="was used several times, on rows that are not the same"):
        step(made, *inputs(), **({"users": torch.arange(B)} if named else {}))


@pytest.mark.parametrize("where", ["nowhere", "inside"])
def test_rows_of_other_sizes_are_checked_though_no_graph_is_made(where: str) -> None:
    net = Net(turned, where)
    made, (x, y) = found(net), inputs()
    with torch._dynamo.config.patch(assume_static_by_default=False):
        step(made, x, y)
        for size in (4, 3):  # what is known of five rows says nothing of these
            with pytest.raises(IsolationError, match="is not its own"):
                step(made, x[:size], y[:size])


def sometimes(layer: nn.Module, x: Tensor) -> Tensor:
    return turned(layer, x) if TURNED else layer(x)  # type: ignore[no-any-return]


TURNED: list[bool] = []


def test_batches_after_one_that_was_refused_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (x, y) = found(Net(sometimes, "nowhere")), inputs()
    step(made, x, y)
    monkeypatch.setitem(globals(), "TURNED", [True])
    for _ in range(3):  # a graph is made in the first one only
        with pytest.raises(IsolationError, match="is not its own"):
            step(made, x, y)
    monkeypatch.setitem(globals(), "TURNED", [])
    step(made, x, y)
    checks = made[0].isolation.schedule.checks
    for _ in range(3):
        step(made, x, y)
    assert made[0].isolation.schedule.checks == checks
