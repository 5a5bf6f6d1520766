"""Muon and AdamW under one engine on two ranks: the parameters are those of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.several_optimizers import B, muon_and_adamw, net, private, take_steps

MODES = {
    "ghost_fsdp": FSDP2Wrapper,
    "ghost_fsdp_bk": FSDP2Wrapper,
    "hooks": DistributedDataParallel,
    "ghost_bk": DistributedDataParallel,
}


def penalty(model: Any) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() * 0.05


def full(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def on_ranks(rank: int, world_size: int) -> dict[tuple[str, float], Any]:
    results = {}
    for mode, wrap in MODES.items():
        for sigma in (0.0, 1.0):
            progress((mode, sigma))
            model = net()
            engine, wrapped, optimizer, criterion = private(
                wrap(model), muon_and_adamw(model), mode, sigma, expected_batch_size=B
            )
            optimizer.add_penalty(lambda model=model: penalty(model))
            take_steps(wrapped, optimizer, criterion, 1, slice(0, 2) if rank == 0 else slice(2, B))
            parameters = list(model.parameters())
            results[mode, sigma] = (
                [full(p.grad) for p in parameters],
                [full(p) for p in parameters],
                len(engine.accountant),
            )
    return results


def test_two_ranks_are_one_process() -> None:
    alone = {}
    for sigma in (0.0, 1.0):
        model = net()
        _, wrapped, optimizer, criterion = private(model, muon_and_adamw(model), "ghost", sigma)
        optimizer.add_penalty(lambda model=model: penalty(model))
        take_steps(wrapped, optimizer, criterion, 1)
        alone[sigma] = list(model.parameters())
    first, second = run_distributed(on_ranks, 2)
    for (mode, sigma), (grads, parameters, counted) in first.items():
        assert counted == 1
        others = second[mode, sigma][1]
        for grad, got, other, want, start in zip(
            grads, parameters, others, alone[sigma], net().parameters(), strict=True
        ):
            assert torch.equal(got, other), mode
            if sigma and "fsdp" not in mode:  # under DDP each rank draws its part of the noise
                continue
            torch.testing.assert_close(grad, want.grad, rtol=1e-5, atol=1e-7)
            # torch's Muon computes in bf16, and in another order on shards.
            assert (got - want).abs().max() < 0.2 * (want - start).abs().max(), mode
