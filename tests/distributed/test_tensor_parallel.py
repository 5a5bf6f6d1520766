"""Ghost clipping of split layers equals one process in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.distributed import run_distributed
from tests.helpers.modes import assert_close
from tests.helpers.problems import clipped_sum
from tests.helpers.sharded import full

B = 6


class Block(nn.Module):
    """Two split layers around a non-linearity, and a whole normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).mean(1)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(B, 5, 6) * 3, torch.randint(0, 3, (B,))


def model() -> Block:
    torch.manual_seed(0)
    return Block()


def train(rank: int, world_size: int, clip: float, sigma: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    split = parallelize_module(model(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    out = PrivacyEngine().make_private(
        module=split, optimizer=torch.optim.SGD(split.parameters(), lr=0.0), noise_multiplier=sigma,
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=B), poisson_sampling=False,
        max_grad_norm=clip, grad_sample_mode="ghost_tp", loss_reduction="sum",
        criterion=nn.CrossEntropyLoss(reduction="sum"),
    )  # fmt: skip
    inputs, targets = batch()
    grads = []
    for _ in range(2):
        out[1].zero_grad()
        out[2](out[0](inputs), targets).backward()
        out[1].step()
        grads.append([full(p.grad).clone() for p in split.parameters()])
    return {"norms": out[0].per_sample_gradient_norms, "grads": grads}


def test_norms_and_gradients_equal_oracle_and_noise_agrees() -> None:
    inputs, targets = batch()
    reference = copy.deepcopy(model()).double()
    samples = []
    for i in range(B):
        loss = nn.functional.cross_entropy(
            reference(inputs[i : i + 1].double()), targets[i : i + 1]
        )
        samples.append(list(torch.autograd.grad(loss, list(reference.parameters()))))
    _, norms = clipped_sum(samples, 1.0)
    clip = norms.median().item()
    want, _ = clipped_sum(samples, clip)
    for result in run_distributed(train, 2, clip, 0.0):
        torch.testing.assert_close(result["norms"].double(), norms, rtol=1e-5, atol=1e-7)
        assert_close(result["grads"][0], want)
        assert_close(result["grads"][1], want)
    first, second = run_distributed(train, 2, clip, 1.0)
    for a, b in zip(first["grads"][0], second["grads"][0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)  # one logical gradient on all ranks
    weight = first["grads"][0][2] - want[2]
    assert 0.4 * clip < weight.std() < 2 * clip  # 48 numbers
    assert not torch.allclose(weight[:4], weight[4:])  # shards draw different noise
