"""A step of a net whose samples are not in dimension 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

B, T, CLIP = 4, 5, 0.3


def token_batch(rows: int = B, length: int = T, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (rows, length), generator=generator)
    return ids, torch.randint(0, 3, (rows,), generator=generator)


def private(model: nn.Module, mode: str, **kwargs: Any) -> tuple[Any, Any, Any]:
    if mode.endswith("-deferred"):
        kwargs["deferred_norm"] = True
    data = TensorDataset(*token_batch())
    out = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(data, batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode.split("-")[0],
        **kwargs,
    )
    return out[0], out[1], out[2] if len(out) == 4 else nn.CrossEntropyLoss(reduction="sum")


def step(run: tuple[Any, Any, Any], inputs: Tensor, targets: Tensor) -> None:
    run[1].zero_grad()
    run[2](run[0](inputs), targets).backward()
    run[1].step()
