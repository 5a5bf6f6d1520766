"""Correlated noise under FSDP2: the weights of one process, also after a checkpoint in the middle."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.correlated import Run, model, reference
from tests.helpers.distributed import progress, run_distributed

PASSES = 3


def weights_of_rank(rank: int, world_size: int, modes: list[str]) -> dict[str, list[Tensor]]:
    found = {}
    for mode in modes:
        progress(mode)
        run = Run(sharded(), mode)
        run.train(1)
        file = io.BytesIO()
        run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
        file.seek(0)
        run.train(PASSES - 1)
        found[mode] = whole(run)
        resumed = Run(sharded(), mode)
        resumed.engine.load_checkpoint(path=file, module=resumed.model, optimizer=resumed.optimizer)
        resumed.train(PASSES - 1)
        found[f"{mode}, resumed"] = whole(resumed)
    return found


def sharded() -> nn.Module:
    return FSDP2Wrapper(model())


def whole(run: Run) -> list[Tensor]:
    return [p.detach().full_tensor() for p in run.optimizer.params]


@pytest.mark.parametrize(
    "world_size,modes", [(2, ["ghost_fsdp", "ghost_fsdp_bk"]), (4, ["ghost_fsdp_bk"])]
)
def test_ranks_end_like_the_float64_reference(world_size: int, modes: list[str]) -> None:
    run: Any = Run(model())
    want = reference(run, list(run.loader) * PASSES)
    moved = [(a - b).abs().max() for a, b in zip(want, model().parameters(), strict=True)]
    assert min(moved) > 0.01
    for found in run_distributed(weights_of_rank, world_size, modes, timeout=120):
        assert len(found) == 2 * len(modes)
        for case, got in found.items():
            torch.testing.assert_close(
                got, want, rtol=1e-7, atol=1e-9, msg=lambda m, c=case: f"{c}: {m}"
            )
