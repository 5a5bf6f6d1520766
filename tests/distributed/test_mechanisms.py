"""Grids, DPAdamW, scale-then-privatise and DiSK on ranks: the weights of a float64 loop."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.kernels.noise.gaussian import grid_of
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DDP
from opacus.optimizers.adam import DPAdamW
from opacus.optimizers.filtered import DiSK
from opacus.optimizers.scaled import ScaledAdamW
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.correlated import BATCHES, CLIP, ROWS, Run, clipped_sum, model, white
from tests.helpers.distributed import progress, run_distributed

SIGMA, GRID, PASSES = 0.1, 2.0**-4, 2


def disk(parameters: Any) -> DiSK:
    return DiSK(torch.optim.AdamW(parameters, lr=0.02), kappa=0.6)


OPTIMIZERS: dict[str, Any] = {
    "DPAdamW": partial(DPAdamW, lr=0.02, floor=1e-8),
    "ScaledAdamW": partial(ScaledAdamW, every=2, lr=0.05, betas=(0.8, 0.9)),
    "DiSK": disk,
}
FSDP = [("DPAdamW", "ghost_fsdp_bk"), ("ScaledAdamW", "ghost_fsdp"), ("DiSK", "ghost_fsdp_bk")]
ON_RANKS = [*FSDP, ("DPAdamW", "hooks"), ("ScaledAdamW", "ghost")]  # the last two with DDP


def run_of(name: str, mode: str, wrap: Any = lambda module: module, **kw: Any) -> Run:
    given = {"noise_multiplier": SIGMA, "release_grid": GRID, "correlated_noise": None, **kw}
    return Run(wrap(model()), mode, made_by=OPTIMIZERS[name], **given)


def weights_of_rank(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, mode in cases:
        progress(f"{name} {mode}")
        run = run_of(name, mode, FSDP2Wrapper if "fsdp" in mode else DDP)
        run.train(PASSES)
        found[name, mode] = whole(run)
    progress("secure mode with DDP")
    run = run_of("DPAdamW", "ghost", DDP, seed=None, secure=True, loss_reduction="sum",
                 criterion=nn.CrossEntropyLoss(reduction="sum"))  # fmt: skip
    run.train(1)
    found["secure"] = [p.grad for p in run.optimizer.params]
    return found


def whole(run: Run) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in run.optimizer.params]


def reference(name: str) -> list[Tensor]:
    """Sample by sample in one process, with the draws that the ranks have."""
    one = run_of(name, "hooks")
    one.train(PASSES)
    module, size, std = model(), ROWS / BATCHES, SIGMA * CLIP
    optimizer: Any = OPTIMIZERS[name](module.parameters())
    grid = grid_of(std, GRID)
    for number, (x, y) in enumerate(one.seen):
        scales = getattr(optimizer, "gradient_scales", lambda: [1.0] * 4)()
        sums = clipped_sum(module, x, y, scales)
        for p, total, z, scale in zip(
            module.parameters(), sums, white(one, number), scales, strict=True
        ):
            noised = torch.floor((total * scale + std * z) / grid + 0.5) * grid
            p.grad = noised / scale / size
        if hasattr(optimizer, "noise_std"):
            optimizer.noise_std = std / size
        optimizer.step()
    if name == "ScaledAdamW":
        assert len({*optimizer.gradient_scales()}) > 1
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("world_size,cases", [(2, ON_RANKS), (4, FSDP)])
def test_ranks_end_like_the_float64_loop(world_size: int, cases: list[tuple[str, str]]) -> None:
    want = {name: reference(name) for name in OPTIMIZERS}
    results = run_distributed(weights_of_rank, world_size, cases)
    for found in results:
        for name, mode in cases:
            torch.testing.assert_close(
                found[name, mode], want[name], rtol=1e-7, atol=1e-9,
                msg=lambda m, case=(name, mode): f"{case}: {m}",
            )  # fmt: skip
    assert (
        min(float((a - b).abs().max()) for a, b in zip(want["DiSK"], want["DPAdamW"], strict=True))
        > 1e-3
    )
    # What DDP releases in secure mode is a multiple of the grid, and the same on all ranks.
    for gradient, other in zip(results[0]["secure"], results[1]["secure"], strict=True):
        steps = gradient / grid_of(SIGMA * CLIP, GRID)
        assert torch.equal(steps, steps.round()) and torch.equal(gradient, other)
        assert math.isfinite(float(steps.abs().max())) and float(steps.abs().max()) > 1
