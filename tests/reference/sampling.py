"""Scenarios: batches of every sampler on the same seeds, physical batches, loaders."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

SAMPLES, RATE = 200, 0.07


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform() -> dict[str, Any]:
    sampler = UniformWithReplacementSampler(
        num_samples=SAMPLES, sample_rate=RATE, generator=generator(5)
    )
    return {"len": len(sampler), "batches": [list(batch) for _ in range(3) for batch in sampler]}


def uniform_steps() -> dict[str, Any]:
    sampler = UniformWithReplacementSampler(
        num_samples=SAMPLES, sample_rate=RATE, generator=generator(6), steps=400
    )
    return {"len": len(sampler), "sizes": [len(batch) for batch in sampler]}


def distributed(rank: int, shuffle: bool) -> dict[str, Any]:
    """One of 3 ranks; no process group is needed to draw its share."""
    with (
        patch("torch.distributed.get_world_size", return_value=3),
        patch("torch.distributed.get_rank", return_value=rank),
        patch("torch.distributed.is_initialized", return_value=True),
    ):
        sampler = DistributedUniformWithReplacementSampler(
            total_size=SAMPLES,
            sample_rate=RATE,
            shuffle=shuffle,
            shuffle_seed=9,
            steps=400,
            generator=generator(7 + rank),
        )
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append([torch.as_tensor(batch).tolist() for batch in sampler])
    return {
        "len": len(sampler),
        "shares": [sorted({i for batch in epoch for i in batch}) for epoch in epochs],
        "sizes": [len(batch) for epoch in epochs for batch in epoch],
    }


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(40.0).reshape(40, 1), torch.arange(40) % 3)


def loader() -> dict[str, Any]:
    """Batches that a private loader delivers, empty ones too."""
    plain = DataLoader(dataset(), batch_size=2)
    private = DPDataLoader.from_data_loader(plain, generator=generator(8))
    batches = [[list(t.shape) for t in batch] + [batch[1].tolist()] for batch in private]
    dtypes = [str(t.dtype) for t in next(iter(private))]
    return {"len": len(private), "rate": private.sample_rate, "batches": batches, "dtypes": dtypes}


def physical() -> dict[str, Any]:
    """Sizes of physical batches, and which of them end a step."""
    torch.manual_seed(4)
    model = nn.Linear(1, 3)
    model, optimizer, private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset(), batch_size=10),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    sizes, skipped = [], []
    with BatchMemoryManager(
        data_loader=private, max_physical_batch_size=3, optimizer=optimizer
    ) as small:
        for inputs, targets in small:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            sizes.append(len(inputs))
            skipped.append(bool(optimizer._is_last_step_skipped))
    parameters = [p.detach() for p in model.parameters()]
    return {"sizes": sizes, "skipped": skipped, "parameters": parameters}


RUNS: dict[str, Any] = {
    "uniform": uniform,
    "uniform_steps": uniform_steps,
    "loader": loader,
    "physical": physical,
}
for rank in range(3):
    for shuffle in (True, False):
        RUNS[f"distributed-{rank}-{shuffle}"] = partial(distributed, rank, shuffle)
