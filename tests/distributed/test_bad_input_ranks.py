"""Mistakes in distributed training: a clear error on every rank, and nobody waits."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModuleFastGradientClippingFSDP
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import distributed as distributed_utils
from tests.helpers import oracle
from tests.helpers.distributed import DistributedTestError, progress, run_distributed


def build(hidden: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 5) * 3, torch.randint(0, 3, (8,))


def make_private(net: nn.Module, **kwargs: Any) -> Any:
    arguments = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.0),
        "data_loader": DataLoader(TensorDataset(*batch()), batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "grad_sample_mode": "ghost_fsdp",
    }
    return PrivacyEngine().make_private(**{**arguments, **kwargs})


def step(private: Any) -> None:
    module, optimizer, criterion, _ = private
    inputs, targets = batch()
    criterion(module(inputs), targets).backward()
    optimizer.step()


# --- mistakes: what each rank does ---


def other_clipping_norm(rank: int) -> None:
    make_private(FSDP2Wrapper(build()), max_grad_norm=1.0 + rank)


def other_noise(rank: int) -> None:
    make_private(FSDP2Wrapper(build()), noise_multiplier=1.0 + rank)


def other_mode(rank: int) -> None:
    mode = "ghost_fsdp_bk" if rank else "ghost_fsdp"
    make_private(FSDP2Wrapper(build()), grad_sample_mode=mode)


def other_model(rank: int) -> None:
    make_private(FSDP2Wrapper(build(6 + 2 * rank)))


def other_frozen_layers(rank: int) -> None:
    net = build()
    net[0].requires_grad_(rank == 0)
    make_private(FSDP2Wrapper(net))


def refused_on_one_rank(rank: int) -> None:
    make_private(FSDP2Wrapper(build()), max_grad_norm=-1.0 if rank else 1.0)


def optimizer_of_another_model_on_one_rank(rank: int) -> None:
    net = FSDP2Wrapper(build())
    trained = build() if rank == 0 else net
    make_private(net, optimizer=torch.optim.SGD(trained.parameters(), lr=0.1))


def not_sharded_on_one_rank(rank: int) -> None:
    net = build()
    sharded = FSDP2Wrapper(build())  # a collective call in torch
    make_private(net if rank else sharded)


def parameter_outside_every_unit(rank: int) -> None:
    net = build()
    fully_shard(net[0])
    make_private(net)


def tensor_parallel_alone(rank: int) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    make_private(parallelize_module(build(), init_device_mesh("cpu", (2,)), plan))


def deferred_variable(rank: int) -> None:
    os.environ["OPACUS_USE_DEFERRED_NORM"] = "yes"
    try:
        make_private(FSDP2Wrapper(build()))
    finally:
        del os.environ["OPACUS_USE_DEFERRED_NORM"]


def deferred_variable_on_one_rank(rank: int) -> None:
    os.environ["OPACUS_USE_DEFERRED_NORM"] = "2" if rank else "1"
    try:
        make_private(FSDP2Wrapper(build()))
    finally:
        del os.environ["OPACUS_USE_DEFERRED_NORM"]


def mode_for_one_process(rank: int) -> None:
    make_private(FSDP2Wrapper(build()), grad_sample_mode="ghost")


def hooks_mode(rank: int) -> None:
    make_private(FSDP2Wrapper(build()), grad_sample_mode="hooks")


def layout_with_another_mode(rank: int) -> None:
    make_private(build(), grad_sample_mode="ghost", data_layout="replicated")


def unknown_layout_of_the_class(rank: int) -> None:
    GradSampleModuleFastGradientClippingFSDP(FSDP2Wrapper(build()), data_layout="same")


def sharded_after_ghost(rank: int) -> None:
    net = build()
    private = make_private(net, grad_sample_mode="ghost", poisson_sampling=False)
    fully_shard(net)
    step(private)


def layers_sharded_after_ghost(rank: int) -> None:
    net = build()
    private = make_private(net, grad_sample_mode="ghost", poisson_sampling=False)
    fully_shard(net[0])
    step(private)


def sharded_after_hooks(rank: int) -> None:
    net = build()
    module, optimizer, _ = make_private(net, grad_sample_mode="hooks", poisson_sampling=False)
    fully_shard(net)
    inputs, targets = batch()
    nn.functional.cross_entropy(module(inputs), targets).backward()
    optimizer.step()


def unknown_argument_on_one_rank(rank: int) -> None:
    make_private(FSDP2Wrapper(build()), **({"nonsense": 1} if rank else {}))


# What each rank says, or what rank 0 and what rank 1 say.
MISTAKES: dict[Callable[[int], None], str | tuple[str, str]] = {
    other_clipping_norm: r"ranks must agree.*max_grad_norm \(by rank\): \['1.0', '2.0'\]",
    other_noise: r"ranks must agree.*noise_multiplier \(by rank\)",
    other_mode: r"ranks must agree.*grad_sample_mode \(by rank\)",
    other_model: r"ranks must agree.*the model \(by rank\): .*parameters with .* elements",
    other_frozen_layers: r"ranks must agree.*the model \(by rank\)",
    refused_on_one_rank: (
        "refused on another rank. rank 1: ValueError: max_grad_norm must be > 0",
        "max_grad_norm must be > 0",
    ),
    optimizer_of_another_model_on_one_rank: (
        "optimizer holds 4 parameters that are not the module's",
        "refused on another rank. rank 0: .*not the module's",
    ),
    not_sharded_on_one_rank: ("refused on another rank. rank 1: .*not sharded", "not sharded"),
    parameter_outside_every_unit: r"parameters \['2.weight', '2.bias'\] are not sharded by FSDP2",
    tensor_parallel_alone: "are not sharded by FSDP2",
    deferred_variable: "OPACUS_USE_DEFERRED_NORM must be 0 or 1, got 'yes'",
    deferred_variable_on_one_rank: (
        "refused on another rank.*OPACUS_USE_DEFERRED_NORM must be 0 or 1",
        "OPACUS_USE_DEFERRED_NORM must be 0 or 1, got '2'",
    ),
    mode_for_one_process: "sharded by FSDP2.*ghost_fsdp",
    hooks_mode: "sharded by FSDP2.*ghost_fsdp",
    layout_with_another_mode: "data_layout='replicated' is for models sharded by FSDP2",
    unknown_layout_of_the_class: "data_layout must be one of",
    sharded_after_ghost: "after make_private",
    layers_sharded_after_ghost: "after make_private",
    sharded_after_hooks: "after make_private",
    unknown_argument_on_one_rank: (
        "refused on another rank.*unexpected arguments.*nonsense",
        "^TypeError: make_private got unexpected arguments.*nonsense",
    ),
}


def run_all(rank: int, world_size: int) -> dict[str, str]:
    return {function.__name__: message_of(function, rank) for function in MISTAKES}


def message_of(function: Callable[[int], None], rank: int) -> str:
    progress(function.__name__)
    try:
        function(rank)
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@functools.cache
def messages() -> list[dict[str, str]]:
    return run_distributed(run_all, 2)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_every_rank_says_what_is_wrong(mistake: Callable[[int], None]) -> None:
    expected = MISTAKES[mistake]
    wanted = (expected, expected) if isinstance(expected, str) else expected
    for said, want in zip(messages(), wanted, strict=True):
        assert re.search(want, said[mistake.__name__]), said[mistake.__name__]


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="need a process group: start with torchrun"):
        make_private(build())


def alone(rank: int, world_size: int) -> dict[str, Any]:
    """A process group of one rank."""
    net = FSDP2Wrapper(build())
    loader = DataLoader(TensorDataset(*batch()), batch_size=8)
    private = make_private(net, data_loader=loader, noise_multiplier=0.0, poisson_sampling=False)
    step(private)
    grads = {n: p.grad.full_tensor() for n, p in net.named_parameters()}
    return {"grads": grads, "norms": private[0].gather_norm_samples()}


def test_world_size_one_is_one_process() -> None:
    def loss(net: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(one[0]), one[1])

    grads = oracle.per_sample_gradients(build(), loss, batch())
    (result,) = run_distributed(alone, 1)
    assert oracle.relative_error(result["norms"], oracle.norms(grads)) <= 1e-5
    for name, total in oracle.clipped_sum(grads, 1.0).items():
        assert oracle.relative_error(result["grads"][name], total / 8) <= 1e-5


def one_rank_stays_away(rank: int, world_size: int) -> None:
    distributed_utils.STALL = 5.0
    progress("a collective that both run")
    dist.barrier()
    progress("a collective that one leaves out")
    if rank == 0:
        dist.barrier()
    else:
        _sleeps_elsewhere()


def _sleeps_elsewhere() -> None:
    time.sleep(250)


def test_a_hang_fails_soon_and_tells_where_each_rank_stands() -> None:
    assert distributed_utils.STALL < 240
    start = time.monotonic()
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(one_rank_stays_away, 2, timeout=240)
    assert time.monotonic() - start < 150  # not the whole time
    first, second = str(caught.value).split("rank 1 hung")
    assert "rank 0 hung in a collective that one leaves out" in first and "barrier" in first
    assert "_sleeps_elsewhere" in second
