"""A problem trained privately in one process, and what the oracle says of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.problems import PROBLEMS, build, clipped_sum, criterion, per_sample

B = 5


def oracle(name: str, inputs: Tensor, targets: Tensor, clip: float) -> tuple[list[Tensor], Tensor]:
    """Clipped sum of gradients and norms, one sample at a time in float64."""
    return clipped_sum(per_sample(name, build(name).double(), inputs, targets), clip)


def private(name: str, mode: str, clip: float, reduction: str = "mean", **kwargs: object):
    """Model, optimizer and criterion of a problem, private without noise."""
    model = build(name)
    data = TensorDataset(*PROBLEMS[name].batch(4 * B))
    out = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        criterion=criterion(name, reduction),
        data_loader=DataLoader(data, batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        **kwargs,
    )
    loss_fn = out[2] if len(out) == 4 else criterion(name, reduction)
    return out[0], out[1], loss_fn


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    scale = max(w.abs().max().item() for w in want)
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).abs().max().item() <= tolerance * scale
