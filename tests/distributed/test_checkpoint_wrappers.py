"""One-file checkpoints load however the model is wrapped: compiled, replicated, sharded, alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.privacy.noise import parameter_names
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.sharded import full

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler

STEPS = 2


def net(compiled: bool = False) -> nn.Module:
    torch.manual_seed(0)
    block: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    block = torch.compile(block, backend="eager") if compiled else block
    return nn.Sequential(nn.Linear(6, 4), block, nn.Linear(4, 3))


class Named(nn.Module):
    """A model whose own names look like those of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module[1])
    fully_shard(module)
    return module


ALONE: dict[str, Callable[[], tuple[nn.Module, str]]] = {
    "plain": lambda: (net(), "hooks"),
    "compiled block": lambda: (net(compiled=True), "ghost_bk"),
    "compiled": lambda: (torch.compile(net(), backend="eager"), "ghost_bk"),  # type: ignore
}
ON_RANKS: dict[str, Callable[[], tuple[nn.Module, str]]] = {
    "ddp": lambda: (DistributedDataParallel(net()), "ghost_bk"),
    "dpddp, compiled block": lambda: (
        DifferentiallyPrivateDistributedDataParallel(net(compiled=True)),
        "ghost",
    ),
    "fsdp": lambda: (sharded(net()), "ghost_fsdp_bk"),
    "fsdp, compiled block": lambda: (sharded(net(compiled=True)), "ghost_fsdp_bk"),
}


class Run:
    def __init__(self, module: nn.Module, mode: str) -> None:
        draw = torch.Generator().manual_seed(1)
        targets = torch.randint(3, (32,), generator=draw)
        data = TensorDataset(torch.randn(32, 6, generator=draw), targets)
        self.inner = module
        self.engine = PrivacyEngine(accountant="rdp")
        made: Any = self.engine.make_private(
            module=module,
            optimizer=torch.optim.AdamW(module.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            grad_sample_mode=mode,
        )
        self.module, self.optimizer, *loss, self.loader = made
        self.loss = loss[0] if loss else nn.CrossEntropyLoss()

    def train(self) -> Run:
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            self.loss(self.module(inputs), targets).backward()
            self.optimizer.step()
        return self

    @property
    def parts(self) -> dict[str, Any]:
        return {"module": self.module, "optimizer": self.optimizer}

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, whole, by the names of the model itself."""
        names, found = parameter_names(self.inner), {}
        for parameter in self.inner.parameters():
            name, state = names[id(parameter)], self.optimizer.state[parameter]
            found[name] = full(parameter).detach().clone()
            found |= {f"{name} {k}": full(state[k]).clone() for k in ("exp_avg", "exp_avg_sq")}
        return found


def save_all(kinds: dict[str, Any], folder: str) -> dict[str, dict[str, Tensor]]:
    states = {}
    for kind, make in kinds.items():
        run = Run(*make()).train()
        run.engine.save_checkpoint(path=f"{folder}/{kind}.pt", **run.parts)
        states[kind] = run.state()
    return states


def load_all(kinds: dict[str, Any], states: dict[str, Any], folder: str) -> None:
    for (kind, make), (saved, state) in itertools.product(kinds.items(), states.items()):
        progress(f"{saved} into {kind}")
        run = Run(*make())
        run.engine.load_checkpoint(path=f"{folder}/{saved}.pt", **run.parts)
        torch.testing.assert_close(run.state(), state, rtol=0, atol=0)
        assert len(run.engine.accountant) == run.optimizer._parallelism.key.step == STEPS


def on_ranks(rank: int, world_size: int, folder: str, alone: Any) -> dict[str, Any]:
    states = save_all(ON_RANKS, folder)
    load_all(ON_RANKS, states | alone, folder)
    return states


def test_any_wrapper_loads_what_any_has_saved(tmp_path: Any) -> None:
    folder = str(tmp_path)
    alone = save_all(ALONE, folder)
    states = run_distributed(on_ranks, 2, folder, alone)[0]
    load_all(ALONE, states | alone, folder)


def test_names_that_look_like_a_wrapper(tmp_path: Any) -> None:
    run = Run(Named(), "hooks").train()
    run.engine.save_checkpoint(path=tmp_path / "run.pt", **run.parts)
    again = Run(Named(), "ghost")
    again.engine.load_checkpoint(path=tmp_path / "run.pt", **again.parts)
    torch.testing.assert_close(again.state(), run.state(), rtol=0, atol=0)
    other = Run(nn.Linear(6, 4), "hooks")
    with pytest.raises(ValueError, match="of another model"):
        other.engine.load_checkpoint(path=tmp_path / "run.pt", **other.parts)
