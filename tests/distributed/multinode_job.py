"""A small private run for torchrun: trains, saves after each step, resumes by itself.

    torchrun ... tests/distributed/multinode_job.py FOLDER STEP [SECONDS]

FOLDER gets the checkpoints (`run/`), a line for each step of each start (`log-<rank>`), and what
the run ended with (`end-<rank>.pt`). From STEP on, each step of a first start takes SECONDS, so
that a test has time to kill something.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed_checkpoint import Checkpointer
from opacus.utils.fsdp_utils import FSDP2Wrapper

EPOCHS, SAMPLES, BATCH = 2, 40, 8
DELTA = 1e-3


def main(folder: Path, slow_from: int, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(1)
    model = FSDP2Wrapper(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)))
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(9))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        data_loader=DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), BATCH),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        grad_sample_mode="ghost_fsdp",
    )
    checkpoints = Checkpointer(
        folder / "run", engine=engine, module=model, optimizer=optimizer, data_loader=loader
    )
    progress = checkpoints.load()
    world = dist.get_world_size()
    with open(folder / f"log-{dist.get_rank()}", "a") as log:
        for _ in range(progress.epoch, EPOCHS):
            for batch, targets in loader:
                optimizer.zero_grad()
                criterion(model(batch), targets).backward()
                optimizer.step()
                step = checkpoints.step
                checkpoints.save_every(1)
                print(world, progress.step, step, os.getpid(), file=log, flush=True)
                if step >= slow_from and progress.step == 0:
                    time.sleep(seconds)
            checkpoints.save(epoch_ended=True)
    end = {
        "weights": [p.full_tensor() for p in model.parameters()],
        "epsilon": engine.get_epsilon(DELTA),
        "history": engine.accountant.history,
        "hosts": os.environ["GROUP_WORLD_SIZE"],
    }
    torch.save(end, folder / f"end-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
