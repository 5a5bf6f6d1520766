"""The mode "ew": batches that Poisson sampling may draw."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

SAMPLES = 6


def private_parts(noise_multiplier: float):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=1),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode="ew",
    )


def test_an_empty_batch_is_a_step_without_a_gradient() -> None:
    model, optimizer, _ = private_parts(0.0)
    before = [p.detach().clone() for p in model.parameters()]
    logits = model(torch.zeros(0, 3))
    nn.functional.cross_entropy(logits, torch.zeros(0, dtype=torch.int64)).backward()
    assert [p.grad_sample.shape for p in model.parameters()] == [(0, *p.shape) for p in before]
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert torch.count_nonzero(parameter.grad) == 0


def test_training_goes_on_after_an_empty_batch() -> None:
    model, optimizer, loader = private_parts(1.0)
    sizes = []
    for _ in range(5):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            before = next(model.parameters()).detach().clone()
            optimizer.step()
            sizes.append(len(inputs))
            assert not torch.equal(next(model.parameters()), before)  # noise, if nothing else
    assert 0 in sizes and max(sizes) > 0
    assert all(p.isfinite().all() for p in model.parameters())


class Named(nn.Module):
    """A model whose input is given by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


def test_keyword_inputs() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 3)
    grads = []
    for mode in ("ew", "hooks"):
        torch.manual_seed(1)
        net = Named()
        model, _, _ = PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(inputs), batch_size=1),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
        model(x=inputs, scale=2.0).square().mean(1).mean().backward()
        grads.append(net.layer.weight.grad_sample)
    assert grads[0].shape == (SAMPLES, 2, 3)
    assert torch.allclose(grads[0], grads[1], atol=1e-6)
