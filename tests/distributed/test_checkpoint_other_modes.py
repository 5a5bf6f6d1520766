"""One-file checkpoints of one mode in a run of another, and loads that fail half way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed_checkpoint import Checkpointer
from tests.helpers.distributed import run_distributed
from tests.helpers.sharded import full

# Two groups, in another order than the model's, and a frozen parameter.
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "plain": torch.optim.SGD,
    "joint": lambda groups, lr: [torch.optim.SGD([group], lr=lr) for group in groups],
}


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    targets = torch.randint(3, (32,), generator=draw)
    return TensorDataset(torch.randn(32, 6, generator=draw), targets)


class Run:
    def __init__(self, mode: str, optimizer: str = "adamw", groups: bool = True) -> None:
        torch.manual_seed(0)
        self.net = net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
        net[2].bias.requires_grad_(False)
        if "fsdp" in mode:
            fully_shard(net[2])
            fully_shard(net)
        parts = [{"params": list(net[2:].parameters()), "lr": 0.2}, {"params": net[0].parameters()}]
        self.engine = PrivacyEngine(accountant="rdp")
        made: Any = self.engine.make_private(
            module=net,
            optimizer=OPTIMIZERS[optimizer](parts if groups else net.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            grad_sample_mode=mode,
        )
        self.module, self.optimizer, *loss, self.loader = made
        self.loss = loss[0] if loss else nn.CrossEntropyLoss()

    def step(self) -> None:
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            self.loss(self.module(inputs), targets).backward()
            self.optimizer.step()

    def save(self, path: str) -> None:
        self.engine.save_checkpoint(path=path, module=self.module, optimizer=self.optimizer)

    def load(self, path: str, **more: Any) -> None:
        self.engine.load_checkpoint(path=path, module=self.module, optimizer=self.optimizer, **more)

    def state(self) -> dict[str, Any]:
        """Whole tensors of model and optimizer by name, and what was spent."""
        states = self.optimizer.state
        return {
            "model": {n: full(p).detach().clone() for n, p in self.net.named_parameters()},
            "optimizer": {
                n: {k: copy.deepcopy(full(v) if isinstance(v, Tensor) else v) for k, v in states[p].items()}
                for n, p in self.net.named_parameters() if p in states
            },
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "history": list(self.engine.accountant.history),
            "next": self.optimizer._parallelism.key.step,
        }  # fmt: skip


def resumed(folder: str, optimizer: str) -> dict[str, Any]:
    """What a folder of shards holds."""
    run = Run("ghost_fsdp_bk", optimizer)
    Checkpointer(folder, engine=run.engine, module=run.module, optimizer=run.optimizer).load()
    return run.state()


def moved(rank: int, world_size: int, folder: str, optimizer: str) -> list[dict[str, Any]]:
    run = Run("ghost_fsdp_bk", optimizer)
    run.load(f"{folder}/run.pt")
    loaded = run.state()
    run.step()
    run.save(f"{folder}/back.pt")
    parts = {"module": run.module, "optimizer": run.optimizer}
    Checkpointer(f"{folder}/shards", engine=run.engine, **parts).save()
    return [loaded, run.state(), resumed(f"{folder}/shards", optimizer)]


@pytest.mark.parametrize("layout", ["ours", "opacus 1.6.0"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_from_one_process_to_shards_and_back(tmp_path: Path, optimizer: str, layout: str) -> None:
    path = str(tmp_path / "run.pt")
    run = Run("hooks", optimizer)
    run.step()
    run.save(path)
    if layout != "ours":
        saved = torch.load(path)
        for entry in ("noise_generator", "privacy_parameters"):
            del saved[entry]
        torch.save(saved, path)
    loaded, end, again = run_distributed(moved, 2, str(tmp_path), optimizer)[0]
    torch.testing.assert_close(loaded, run.state(), rtol=0, atol=0)
    assert end["history"] == [(1.0, 0.5, 4)]
    torch.testing.assert_close(again, end, rtol=0, atol=0)
    back = Run("hooks", optimizer)
    back.load(str(tmp_path / "back.pt"))
    torch.testing.assert_close(back.state(), end, rtol=0, atol=0)


def unlike(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    states = []
    for name in ("more", "less"):
        run = Run("ghost_fsdp_bk")
        with pytest.raises(ValueError, match="of another model"):
            run.load(f"{folder}/{name}.pt")
        loading = {"strict": False}
        run.engine.load_checkpoint(
            path=f"{folder}/{name}.pt", module=run.module, module_load_dict_kwargs=loading
        )
        states.append(run.state()["model"])
    return states


def test_shards_of_a_model_that_differs_a_little(tmp_path: Path) -> None:
    run = Run("hooks")
    run.step()
    run.save(str(tmp_path / "run.pt"))
    saved = torch.load(tmp_path / "run.pt")
    weights = saved["module_state_dict"]
    for name, changed in {
        "more": {**weights, "_module.9.weight": torch.zeros(2)},
        "less": {n: v for n, v in weights.items() if n != "_module.0.bias"},
    }.items():
        torch.save({**saved, "module_state_dict": changed}, tmp_path / f"{name}.pt")
    more, less = run_distributed(unlike, 2, str(tmp_path))[0]
    want, new = run.state()["model"], Run("hooks").state()["model"]
    torch.testing.assert_close(more, want, rtol=0, atol=0)
    torch.testing.assert_close(less, {**want, "0.bias": new["0.bias"]}, rtol=0, atol=0)


def test_an_optimizer_of_other_groups_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    one, other = Run("hooks", groups=False), Run("hooks")
    one.save(path)
    other.step()
    before = other.state()
    with pytest.raises(
        ValueError, match=r"another optimizer, with groups of \[6\] .*here \[4, 2\]"
    ):
        other.load(path)
    torch.testing.assert_close(other.state(), before, rtol=0, atol=0)


def test_a_load_that_fails_leaves_what_was_spent(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    run = Run("hooks")
    run.save(path)
    run.step()
    with pytest.raises(TypeError):
        run.load(path, module_load_dict_kwargs={"no such": 1})
    assert run.engine.accountant.history == [(1.0, 0.5, 2)]
