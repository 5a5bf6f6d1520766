"""A model sharded by FSDP2 that is trained privately, without noise, on a batch of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine


class Run:
    """The private model, and its steps on four samples ``[6]`` of three classes.

    Args:
        build: Makes the sharded model.
        mode: Of private training.
        rank: Of this process; each has other samples.
        momentum: Of the optimizer.
        how: Further arguments of ``make_private``.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        mode: str,
        rank: int,
        momentum: float = 0.0,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = build()
        made: Any = PrivacyEngine().make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=momentum),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            poisson_sampling=False,
            grad_sample_mode=mode,
            **how,
        )
        self.private, self.optimizer, self.criterion = made[:3]
        numbers, device = torch.Generator("cpu").manual_seed(rank), torch.get_default_device()
        self.x = torch.randn(4, 6, generator=numbers, device="cpu").to(device)
        self.y = torch.randint(0, 3, (4,), generator=numbers, device="cpu").to(device)

    def step(self) -> None:
        """One step on this rank's batch."""
        self.optimizer.zero_grad()
        self.criterion(self.private(self.x), self.y).backward()
        self.optimizer.step()
