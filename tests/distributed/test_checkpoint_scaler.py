"""The state of a GradScaler in a sharded checkpoint: a killed run goes on with its loss scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.distributed_checkpoint import Checkpointer
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import run_distributed

STEPS, SAVED_AFTER = 10, 5
# Squared norms of ghost modes overflow at 2^64.
SCALES = {"hooks": 2.0**10, "ghost": 2.0**67, "ghost_fsdp": 2.0**67}


class Run:
    """A private run whose loss scale moves; in ghost modes it overflows first."""

    def __init__(self, folder: str | Path, mode: str, seed: int = 1, scaled: bool = True) -> None:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        if "fsdp" in mode:
            model = FSDP2Wrapper(model)
        elif dist.is_initialized():
            model = DPDDP(model)
        samples = torch.randn(40, 6, generator=torch.Generator().manual_seed(9))
        engine = PrivacyEngine(accountant="rdp")
        made: Any = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(TensorDataset(samples, (samples[:, 0] > 0).long()), 4),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            grad_sample_mode=mode,
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
        self.scaler = GradScaler("cpu", init_scale=SCALES[mode], growth_interval=2)
        self.checkpoints = Checkpointer(
            folder,
            engine=engine,
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            scaler=self.scaler if scaled else None,
        )
        self.scales: list[float] = []

    def train(self, every: int = STEPS) -> Run:
        """One epoch, or what is left of it, with a checkpoint after ``every`` steps."""
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            self.scaler.scale(self.criterion(self.model(inputs), targets)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
            self.checkpoints.save_every(every)
        return self

    def end(self) -> dict[str, Any]:
        weights = [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in self.model.parameters()
        ]
        return {"weights": weights, "scales": self.scales, "scaler": self.scaler.state_dict()}


def killed_and_resumed(rank: int, world_size: int, folder: str, mode: str) -> list[dict[str, Any]]:
    whole = Run(folder, mode).train(every=SAVED_AFTER)
    resumed = Run(f"{folder}/resumed", mode, seed=77)
    resumed.checkpoints.load(f"{folder}/step-{SAVED_AFTER:08d}")
    return [whole.end(), resumed.train().end()]


def check(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    rest = whole["scales"][SAVED_AFTER:]
    # It moves after the checkpoint, and not as in a run that starts there.
    assert len(set(rest)) > 1
    assert rest != whole["scales"][: len(rest)]
    assert resumed["scales"] == rest
    assert resumed["scaler"] == whole["scaler"]
    for a, b in zip(resumed["weights"], whole["weights"], strict=True):
        # Other noise would differ by 0.2; the last bit depends on where the memory lies.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_one_process(mode: str, tmp_path: Path) -> None:
    check(*killed_and_resumed(0, 1, str(tmp_path), mode))


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("mode", ["hooks", "ghost_fsdp"])
def test_ranks(mode: str, tmp_path: Path) -> None:
    for of_rank in run_distributed(killed_and_resumed, 2, str(tmp_path), mode):
        check(*of_rank)


@pytest.mark.parametrize("saved", [True, False])
def test_a_scaler_on_one_side_only(saved: bool, tmp_path: Path) -> None:
    Run(tmp_path, "hooks", scaled=saved).train(every=SAVED_AFTER)
    other = Run(tmp_path, "hooks", scaled=not saved)
    before = other.end()
    found = "no scaler" if saved else "a scaler"
    with pytest.raises(ValueError, match=rf"GradScaler, and the Checkpointer was given {found}:"):
        other.checkpoints.load()
    for a, b in zip(other.end()["weights"], before["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
