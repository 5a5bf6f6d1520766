"""Correlated noise under FSDP2: the weights of one process, also after a checkpoint in the middle."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.privacy.key import SAMPLING
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DDP
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.correlated import BANDED, BUFFERED, PLAN, Run, model, reference
from tests.helpers.distributed import progress, run_distributed

PASSES = 3


PLANS = {"banded inverse": PLAN, "buffers": BUFFERED, "cyclic Poisson": BANDED}
Found = dict[tuple[str, str, bool], list[Tensor]]  # by plan, mode and whether it was resumed


def weights_of_rank(rank: int, world_size: int, cases: list[tuple[str, str]]) -> Found:
    found: Found = {}
    for name, mode in cases:
        progress(f"{name} {mode}")
        run = Run(wrapped(mode), mode, correlated_noise=PLANS[name])
        run.train(1)
        file = io.BytesIO()
        run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
        file.seek(0)
        run.train(PASSES - 1)
        found[name, mode, False] = whole(run)
        resumed = Run(wrapped(mode), mode, correlated_noise=PLANS[name])
        resumed.engine.load_checkpoint(path=file, module=resumed.model, optimizer=resumed.optimizer)
        resumed.loader.batch_sampler.key.at_least({SAMPLING: 1})  # not the first pass again
        resumed.train(PASSES - 1)
        found[name, mode, True] = whole(resumed)
    return found


def wrapped(mode: str) -> nn.Module:
    return FSDP2Wrapper(model()) if "fsdp" in mode else DDP(model())


def whole(run: Run) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in run.optimizer.params]


@pytest.mark.parametrize(
    "world_size,cases",
    [
        (2, [*((name, "ghost_fsdp") for name in PLANS), ("buffers", "ghost"),
             ("cyclic Poisson", "hooks")]),
        (4, [(name, "ghost_fsdp_bk") for name in PLANS]),
    ],
)  # fmt: skip
def test_ranks_end_like_the_float64_reference(
    world_size: int, cases: list[tuple[str, str]]
) -> None:
    want = {}
    for name, plan in PLANS.items():
        run: Any = Run(model(), correlated_noise=plan)
        run.train(PASSES)
        want[name] = reference(run, run.seen)
        weights = zip(want[name], model().parameters(), strict=True)
        assert min(float((a - b.detach()).abs().max()) for a, b in weights) > 0.01
    for found in run_distributed(weights_of_rank, world_size, cases):
        assert len(found) == 2 * len(cases)
        for case, got in found.items():
            torch.testing.assert_close(
                got, want[case[0]], rtol=1e-7, atol=1e-9, msg=lambda m, c=case: f"{c}: {m}"
            )
