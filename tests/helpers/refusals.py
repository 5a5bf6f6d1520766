"""What a refused call leaves as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def arguments(**changes: Any) -> dict[str, Any]:
    model = changes.pop("module", None) or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    return {
        "module": model,
        "optimizer": optimizer,
        "data_loader": DataLoader(data, batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        **changes,
    }


def assert_untouched(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "autograd_grad_sample_hooks" not in module.__dict__
    for parameter in model.parameters():
        assert not {"grad_sample", "_forward_counter", "summed_grad"} & parameter.__dict__.keys()
