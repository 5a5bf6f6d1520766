"""A model on a card that is not the current one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
B = 4


def released(mode: str, device: str) -> list[Tensor]:
    """The gradients of a step, with noise of a seeded key."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 8, bias=False)
    )
    x, y = torch.randn(B, 40, 16), torch.randn(B, 40, 8)
    model.to(device)
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=B),
        noise_multiplier=0.5,
        max_grad_norm=0.01,
        poisson_sampling=False,
        grad_sample_mode=mode,
        noise_generator=torch.Generator().manual_seed(3),
    )
    model, optimizer = made[0], made[1]
    loss = made[2] if len(made) == 4 else nn.MSELoss()
    loss(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
    return [p.grad.cpu() for p in optimizer.params]


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_step_is_that_of_a_cpu(mode: str) -> None:
    assert torch.cuda.current_device() == 0
    want = released(mode, "cpu")
    for device in ("cuda:0", "cuda:1"):
        got = released(mode, device)
        assert torch.cuda.current_device() == 0
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
            assert b.abs().max() > 1e-4
