"""A flag of a model that is set between steps: rows may move otherwise from then on."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn

from opacus import IsolationError, PrivacyEngine
from opacus.core.record.flags import MOST_NUMBERS, MOST_STATES, Flags

B, T = 4, 5
LATER = 3  # the step from which on the flag is set


class Block(nn.Module):
    """Reverses the samples for its layers, if asked to; or mixes neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)
        self.reverses = self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.mixes:
            x = 0.9 * x + 0.1 * x.roll(1, 0)
        if self.reverses:
            x = x.flip(0)
        x = x + torch.tanh(self.up(self.norm(x)))
        return x.flip(0) if self.reverses else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(4, 8), Block(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.first(x)).mean(1))


def norms(mode: str, flag: str, compiled: bool = False) -> list[Tensor]:
    """Norms of each step on one batch, with a learning rate of 0; the flag is set on the way."""
    net = Net()
    if compiled:
        net.block.compile(backend="aot_eager")
    made: Any = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    module, optimizer, criterion = made[:3]
    x, y = torch.randn(B, T, 4) * torch.tensor([0.1, 1, 3, 9]).view(B, 1, 1), torch.arange(B) % 3
    found = []
    for step in range(LATER + 3):
        setattr(net.block, flag, step >= LATER)
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        found.append(module.per_sample_gradient_norms.clone())
    return found


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_rows_are_followed_anew(mode: str) -> None:
    first, *others = norms(mode, "reverses")
    assert len({round(float(n), 3) for n in first}) == B
    for later in others:
        torch.testing.assert_close(later, first)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_samples_that_are_mixed_from_then_on_are_refused_at_once(mode: str) -> None:
    with pytest.raises(ValueError, match=r"block\.norm.*of no single sample"):
        norms(mode, "mixes")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@torch._functorch.config.patch(donated_buffer=False)
def test_rows_that_a_compiled_block_moves_from_then_on_are_refused_at_once() -> None:
    with pytest.raises(IsolationError, match="block"):
        norms("ghost_bk", "reverses", compiled=True)


def state(flags: Flags, net: nn.Module) -> int:
    flags.look(net)
    return flags.state


def test_states_are_numbered() -> None:
    net, flags = Net(), Flags()
    assert state(flags, net) == state(flags, net) == 0
    net.block.mixes = True
    assert state(flags, net) == 1
    net.block.mixes = False
    assert state(flags, net) == 0
    net.block.eval()
    assert state(flags, net) == 2
    net.train()
    net.block.phase = "warm-up"
    assert state(flags, net) == 3
    net.block.phase = "later"
    assert state(flags, net) == 4


class Part:
    """A configuration."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def in_a_configuration(net: Any) -> None:
    net.config.parts.mixes = True


def in_a_list(net: Any) -> None:
    net.config.kinds[1] = "global"


def in_a_dictionary(net: Any) -> None:
    net.options["rate"] = 0.5


def another_function(net: Any) -> None:
    net.block.forward = lambda x: x.flip(0)


def another_module(net: Any) -> None:
    net.block.up = nn.Identity()


def one_more(net: Any) -> None:
    net.block.add_module("also", nn.Identity())


def a_number(net: Any) -> None:
    net.block.mixes = 2


SETTINGS = [
    in_a_configuration, in_a_list, in_a_dictionary, another_function, another_module, one_more,
    a_number,
]  # fmt: skip


@pytest.mark.parametrize("change", SETTINGS)
def test_what_makes_another_state(change: Any) -> None:
    net, flags = Net(), Flags()
    net.config = Part(parts=Part(mixes=False), kinds=["local", "local"])  # type: ignore[assignment]
    net.options = {"rate": 0.0}  # type: ignore[assignment]
    for _ in range(3):
        assert state(flags, net) == 0
    change(net)
    assert state(flags, net) == state(flags, net) == 1


def test_a_counter_makes_few_states_and_hides_no_other_setting() -> None:
    net, flags = Net(), Flags()
    found = []
    for number in range(40):
        net.block.steps = net.steps = number  # type: ignore[assignment]
        found.append(state(flags, net))
    assert len(set(found)) <= MOST_NUMBERS + 1
    assert len(set(found[-30:])) == 1
    net.block.mixes = True
    assert state(flags, net) not in found


def test_what_the_first_pass_leaves_is_no_other_state() -> None:
    net, flags = Net(), Flags()
    net.longest = 0  # type: ignore[assignment]
    first = state(flags, net)
    net.longest = 7  # type: ignore[assignment]
    assert state(flags, net) == first
    net.longest = 8  # type: ignore[assignment]
    assert state(flags, net) != first


def test_another_model_and_a_copy_begin_anew() -> None:
    net, flags = Net(), Flags()
    flags.look(net)
    assert state(pickle.loads(pickle.dumps(flags)), net) == 0
    other = Net()
    other.block.mixes = True
    assert state(flags, other) == 1


def test_states_without_end_are_told_apart_up_to_a_number() -> None:
    net, flags = Net(), Flags()
    for number in range(MOST_STATES + 10):
        net.block.phase = str(number)
        assert state(flags, net) == min(number, MOST_STATES)
