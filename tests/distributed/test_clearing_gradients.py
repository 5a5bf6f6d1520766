"""Under FSDP2 gradients may be cleared anywhere, as on one process; nothing is summed twice."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from opacus import PrivacyEngine
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.modes import assert_close, oracle
from tests.helpers.problems import PROBLEMS, build, criterion
from tests.helpers.sharded import B, batch_here, full, loader, wrap

CLIP = 0.5
CLEAR = ("before", "between", "model", "model to none", "none", "changed", "only changed", "never")
MODES = ("ghost_fsdp", "ghost_fsdp_bk", "flash_fsdp", "flash_fsdp_bk")
CASES = [(mode, deferred, clear) for mode in MODES for deferred in (False, True) for clear in CLEAR]


def gradients(rank: int, world_size: int, cases: list[tuple[str, bool, str]]) -> list[Any]:
    """Of each case, the gradients of every step of three on the same batch."""
    results = []
    for case in cases:
        progress(case)
        results.append(train(rank, *case))
    return results


def train(rank: int, mode: str, deferred: bool, clear: str) -> list[list[Tensor]]:
    model = wrap(build("mlp").to(torch.get_default_device()), "fsdp")
    private, optimizer, loss_fn, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=criterion("mlp"), data_loader=loader("mlp"), noise_multiplier=0.0,
        max_grad_norm=CLIP, poisson_sampling=False, grad_sample_mode=mode, deferred_norm=deferred,
    )  # fmt: skip
    inputs, targets = (t.tensor_split(2)[rank] for t in batch_here("mlp"))
    seen = []
    for _ in range(3):
        if clear == "before":
            optimizer.zero_grad()
        loss = loss_fn(private(inputs), targets)
        if clear == "between":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append([full(p.grad).clone() for p in model.parameters()])
        if clear in ("model", "model to none"):
            private.zero_grad(set_to_none=clear == "model to none")
        elif clear == "none":
            optimizer.zero_grad(set_to_none=True)
        elif clear in ("changed", "only changed"):  # after the step, say by a logger
            for p in model.parameters():
                p.grad.mul_(2.0)
            if clear == "changed":
                model.zero_grad(set_to_none=True)
    return seen


@functools.cache
def results_of(backend: str = "gloo") -> list[Any]:
    return run_distributed(gradients, 2, CASES, backend=backend)


def check(case: tuple[str, bool, str], ranks: list[Any]) -> None:
    want, norms = oracle("mlp", *PROBLEMS["mlp"].batch(B), CLIP)
    assert (norms > CLIP).any()
    for rank in ranks:
        for step in rank[CASES.index(case)]:
            assert_close(step, [w / B for w in want])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_may_be_cleared_anywhere(case: tuple[str, bool, str]) -> None:
    check(case, results_of())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_may_be_cleared_anywhere_on_gpus(case: tuple[str, bool, str]) -> None:
    check(case, results_of("nccl"))
