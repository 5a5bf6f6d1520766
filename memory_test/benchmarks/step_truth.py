"""What norms and clipped sums have to be, by means that share nothing with the package."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memory_test.benchmarks.contenders import Contender, Recipe, next_token_loss, plain_model
from memory_test.benchmarks.layouts import copies_of
from memory_test.common.launch import Runtime

EPS = 1e-6  # added to the norm by which a clipping factor divides


@dataclass(frozen=True)
class Expected:
    """The reference.

    Attributes:
        norms: ``[W, B]`` norms of all samples of all ranks that have different ones.
        sums: Clipped sum over all samples by parameter name: this rank's shards, or all of it.
        max_grad_norm: The C it was clipped with.
    """

    norms: Tensor
    sums: Mapping[str, Tensor]
    max_grad_norm: float


def oracle(recipe: Recipe, ids: Tensor, device: torch.device) -> Expected:
    """Float64 autograd, one sample at a time; C between the smallest and the largest norm."""
    model = copy.deepcopy(plain_model(recipe, device)[0]).double()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for sample in ids.flatten(0, 1):
        loss = next_token_loss(model, sample[None])
        rows.append(torch.autograd.grad(loss, list(named.values()), materialize_grads=True))
    norms = torch.stack([torch.stack([g.norm() for g in row]).norm() for row in rows])
    bound = float(norms.min() + norms.max()) / 2
    factors = _factors(norms, bound)
    sums = {
        name: sum(
            (c * g for c, g in zip(factors, column, strict=True)), torch.zeros_like(column[0])
        )
        for name, column in zip(named, zip(*rows, strict=True), strict=True)
    }
    return Expected(norms.view(ids.shape[:2]), sums, bound)


def full_truth(
    baseline: Contender, ids: Tensor, max_grad_norm: float, runtime: Runtime
) -> Expected:
    """Norms and clipped sum by the non-private model; a collective call.

    One forward and backward pass for each sample of each rank, in which the other ranks' losses
    have weight zero.
    """
    world, batch = baseline.data.count, len(ids)
    norms = torch.zeros(world, batch, device=ids.device)
    parts = copies_by_name(baseline, runtime)
    sums = {n: torch.zeros_like(local(p), dtype=torch.float32)
            for n, p in baseline.parameters.items()}  # fmt: skip
    for rank in range(world):
        for index in range(batch):
            baseline.park()
            loss = baseline.loss(ids[index : index + 1])
            (loss * float(rank == baseline.data.rank)).backward()
            # FSDP2 divides by the number of ranks that have different samples.
            grads = {n: local(p.grad).float() * world for n, p in baseline.parameters.items()
                     if p.grad is not None}  # fmt: skip
            squares = sum(g.square().sum().double().cpu() / parts[n] for n, g in grads.items())
            norm = over_ranks(torch.as_tensor(squares), baseline, runtime).sqrt()
            norms[rank, index] = norm
            factor = float(_factors(norm, max_grad_norm))
            for name, grad in grads.items():
                sums[name].add_(grad, alpha=factor)
    baseline.park()
    # On the host: nothing of it may count while modes are timed.
    return Expected(norms, {name: value.cpu() for name, value in sums.items()}, max_grad_norm)


def whole_gradient(baseline: Contender, ids: Tensor) -> dict[str, Tensor]:
    """Gradient of a non-private step by name, this rank's part, on the host."""
    baseline.park()
    baseline.loss(ids).backward()
    grads = {n: local(p.grad).float().cpu() for n, p in baseline.parameters.items()
             if p.grad is not None}  # fmt: skip
    baseline.park()
    return grads


def _factors(norms: Tensor, max_grad_norm: float) -> Tensor:
    return (max_grad_norm / (norms + EPS)).clamp(max=1.0)


def over_ranks(values: Tensor, contender: Contender, runtime: Runtime) -> Tensor:
    """The sum over ranks that hold shards, on the host."""
    shards = any(hasattr(p, "full_tensor") for p in contender.parameters.values())
    if not shards or runtime.world_size == 1:
        return values
    moved = values.to(runtime.device)
    dist.all_reduce(moved)
    return moved.cpu()


def copies_by_name(contender: Contender, runtime: Runtime) -> dict[str, int]:
    """By parameter: how many ranks hold the same part of it."""
    return {name: copies_of(p, runtime) if hasattr(p, "full_tensor") else 1
            for name, p in contender.parameters.items()}  # fmt: skip


def local(tensor: Any) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
