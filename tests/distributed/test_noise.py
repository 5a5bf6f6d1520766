"""Noise under DDP and FSDP2: its scale, and that no two streams are equal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.core.ranks.parallelism import Sharded, Single, TensorParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import run_distributed

SIGMA, CLIP, LOCAL = 2.0, 1e-3, 4


STEPS = 6


def noise_of_all(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    modes = ("hooks", "ghost", "ghost_fsdp") if world_size == 2 else ("ghost_fsdp",)
    reductions = ("mean", "sum")
    return {(m, r): noise_of(world_size, m, r, STEPS) for m in modes for r in reductions}


@functools.cache
def results_of(world_size: int, backend: str = "gloo") -> list[dict[tuple[str, str], Any]]:
    return run_distributed(noise_of_all, world_size, backend=backend)


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
        assert correlation(steps[0], steps[i]) < 0.12  # 7 standard errors of 4096 draws
    if mode == "ghost_fsdp":
        for a in range(world_size):
            for b in range(a):
                assert correlation(results[a]["local"], results[b]["local"]) < 0.12


def draw_on_mesh(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """HSDP: noise of a (replicate, shard) mesh; local part and all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(rank)  # even with different seeds, replicas must agree
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = distribute_tensor(torch.zeros(7, 50), mesh, [Replicate(), Shard(0)])
    noise: Any = Sharded().noise(1.0, reference)
    assert noise.shape == reference.shape and noise.to_local().shape == reference.to_local().shape
    return noise.to_local(), noise.full_tensor()


def test_hsdp_replicas_draw_the_same_and_shards_do_not() -> None:
    results = run_distributed(draw_on_mesh, 4)
    torch.testing.assert_close(results[0][0], results[2][0], rtol=0, atol=0)
    torch.testing.assert_close(results[1][0], results[3][0], rtol=0, atol=0)
    assert correlation(results[0][0][:3], results[1][0][:3]) < 0.6  # 150 draws


# --- one seed, any number of ranks ---


TWELVE = (12, 16)
SHAPES = {"0.weight": (13, 10), "0.bias": (7,), "1.weight": (10, 16), "scale": (1,)}


def names_and_zeros(make: Callable[[str], Tensor]) -> tuple[list[str], list[Tensor]]:
    return list(SHAPES), [make(name) for name in SHAPES]


def drawn_by(parallelism: Single, make: Callable[[str], Tensor], steps: int = 2) -> Tensor:
    """All noise of some steps, each parameter whole: what it is added to is zero."""
    drawn = []
    for _ in range(steps):
        names, zeros = names_and_zeros(make)
        dtypes = [torch.float32] * len(zeros)
        for t in parallelism.noised(1.0, zeros, dtypes, in_place=True, names=names):
            drawn.append((t.full_tensor() if isinstance(t, DTensor) else t).flatten())
    return torch.cat(drawn)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def one_process() -> Tensor:
    return drawn_by(Single(generator()), lambda name: torch.zeros(SHAPES[name]))


def noise_on_ranks(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same noise on meshes of several kinds, uneven and empty shards included."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    torch.manual_seed(rank)

    def split(mesh: Any, placements: Callable[[str], Any]) -> Callable[[str], Tensor]:
        def make(name: str) -> Tensor:
            return distribute_tensor(torch.zeros(SHAPES[name]), mesh, placements(name))

        return make

    found = {}
    seed = generator() if rank == 0 else torch.Generator().manual_seed(99)  # rank 0's counts
    line = init_device_mesh("cpu", (world_size,))
    found["rows"] = drawn_by(Sharded(seed), split(line, lambda name: [Shard(0)]))
    columns = split(line, lambda name: [Shard(1 if name == "1.weight" else 0)])
    found["columns"] = drawn_by(TensorParallel(generator()), columns)
    plain = drawn_by(TensorParallel(generator()), lambda name: torch.zeros(SHAPES[name]))
    found["held whole"] = plain
    if world_size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        hybrid = split(square, lambda name: [Replicate(), Shard(0)])
        found["HSDP"] = drawn_by(Sharded(generator()), hybrid)
        both = {
            "0.weight": (Shard(0), Shard(1)),
            "1.weight": (_StridedShard(0, split_factor=2), Shard(0)),
        }
        of = split(square, lambda name: both.get(name, (Shard(0), Replicate())))
        SHAPES["1.weight"] = TWELVE  # torch deals uneven strided shards out otherwise
        try:
            found["TP x FSDP"] = drawn_by(Sharded(generator()), of)
        finally:
            SHAPES["1.weight"] = (10, 16)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_seed_gives_the_same_noise_on_any_number_of_ranks(world_size: int) -> None:
    want = one_process()
    assert want.std() > 0.9
    for found in run_distributed(noise_on_ranks, world_size):
        for kind, got in found.items():
            if kind == "TP x FSDP":
                SHAPES["1.weight"] = TWELVE
                torch.testing.assert_close(got, one_process(), rtol=0, atol=0)
                SHAPES["1.weight"] = (10, 16)
            else:
                torch.testing.assert_close(got, want, rtol=0, atol=0, msg=kind)
