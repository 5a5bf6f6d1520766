"""Noise under DDP and FSDP2: its scale, and that no two streams are equal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.distributed_utils import run_distributed

SIGMA, CLIP, LOCAL = 2.0, 1e-3, 4


STEPS = 6


def noise_of_all(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    modes = ("hooks", "ghost", "ghost_fsdp") if world_size == 2 else ("ghost_fsdp",)
    reductions = ("mean", "sum")
    return {(m, r): noise_of(world_size, m, r, STEPS) for m in modes for r in reductions}


@functools.cache
def results_of(world_size: int, backend: str = "gloo") -> list[dict[tuple[str, str], Any]]:
    return run_distributed(noise_of_all, world_size, timeout=120, backend=backend)


def noise_of(world_size: int, mode: str, reduction: str, steps: int) -> dict[str, Any]:
    """Gradients of steps whose signal is zero, so that only noise is left."""
    torch.manual_seed(0)  # equal seeds on all ranks
    model: nn.Module = nn.Linear(64, 64, bias=False)
    if mode == "ghost_fsdp":
        model = FSDP2Wrapper(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    data = TensorDataset(torch.zeros(LOCAL * world_size, 64), torch.zeros(LOCAL * world_size, 64))
    sampler = DistributedSampler(data, shuffle=False)
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.MSELoss(reduction=reduction), noise_multiplier=SIGMA, max_grad_norm=CLIP,
        data_loader=DataLoader(data, batch_size=LOCAL, sampler=sampler), poisson_sampling=False,
        loss_reduction=reduction, grad_sample_mode=mode,
    )  # fmt: skip
    drawn, local = [], []
    for _ in range(steps):
        for x, y in out[-1]:
            out[1].zero_grad()
            loss_fn = out[2] if len(out) == 4 else nn.MSELoss(reduction=reduction)
            loss_fn(out[0](x), y).backward()
            out[1].step()
            grad = next(model.parameters()).grad
            drawn.append(grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())
            local.append((grad.to_local() if isinstance(grad, DTensor) else grad).clone())
    return {"grads": torch.stack(drawn), "local": torch.stack(local)}


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs().item()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "mode,world_size", [("hooks", 2), ("ghost", 2), ("ghost_fsdp", 2), ("ghost_fsdp", 4)]
)
def test_scale_and_independence(mode: str, world_size: int, reduction: str) -> None:
    check_noise(results_of(world_size), mode, world_size, reduction)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_fsdp"])
def test_scale_and_independence_on_gpus(mode: str, reduction: str) -> None:
    check_noise(results_of(2, "nccl"), mode, 2, reduction)


def check_noise(
    ranks: list[dict[tuple[str, str], Any]], mode: str, world_size: int, reduction: str
) -> None:
    results = [result[mode, reduction] for result in ranks]
    want = SIGMA * CLIP / (LOCAL * world_size if reduction == "mean" else 1)
    for result in results:
        torch.testing.assert_close(result["grads"], results[0]["grads"])  # one logical gradient
        # 6 * 4096 draws: the standard error of the deviation is 0.45%.
        assert result["grads"].std().item() == pytest.approx(want, rel=0.03)
    steps = results[0]["grads"]
    for i in range(1, len(steps)):
        assert correlation(steps[0], steps[i]) < 0.08  # 5 standard errors of 4096 draws
    if mode == "ghost_fsdp":
        for a in range(world_size):
            for b in range(a):
                assert correlation(results[a]["local"], results[b]["local"]) < 0.08


def draw_on_mesh(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """HSDP: noise of a (replicate, shard) mesh; local part and number of elements drawn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from opacus.core.noise import ShardedNoise

    torch.manual_seed(rank)  # even with different seeds, replicas must agree
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = distribute_tensor(torch.zeros(7, 50), mesh, [Replicate(), Shard(0)])
    noise = ShardedNoise(None, False).draw(1.0, reference)
    assert noise.shape == reference.shape and noise.to_local().shape == reference.to_local().shape
    return noise.to_local(), noise.full_tensor()


def test_hsdp_replicas_draw_the_same_and_shards_do_not() -> None:
    results = run_distributed(draw_on_mesh, 4)
    torch.testing.assert_close(results[0][0], results[2][0], rtol=0, atol=0)
    torch.testing.assert_close(results[1][0], results[3][0], rtol=0, atol=0)
    assert correlation(results[0][0][:3], results[1][0][:3]) < 0.4  # 150 draws
    assert dist.is_available()
