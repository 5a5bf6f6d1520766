"""Units that are not rows, under FSDP2 on two ranks: the sum is that of one process, unit by unit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.units import (
    Net,
    assert_right,
    clipped_sum,
    flattened,
    inputs,
    joined,
    private,
    routed,
    time_major,
)

USES = [time_major, routed, joined]
PARTS = ([0, 1, 2], [3, 4])
USERS = torch.tensor([7, 3, 7, 9, 9])
OF_USERS = [torch.tensor([1]), torch.tensor([0, 2]), torch.tensor([3, 4])]


def whole(made: Any) -> list[Tensor]:
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in made]


def sums_of_rank(rank: int, _: int, mode: str, named: bool) -> list[list[Tensor]]:
    results = []
    for use in USES:
        kw = {"privacy_unit": "users"} if named else {}
        made = private(FSDP2Wrapper(Net(use)), mode, 3 if named else 5, **kw)
        for seed in (0, 1):
            x, y = (t[PARTS[rank]] for t in inputs(seed))
            made[1].zero_grad()
            more = {"users": USERS[PARTS[rank]]} if named else {}
            made[2](made[0](x, **more), y).backward()
            made[1].step()
        results.append(whole(made[1].params))
    return results


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_two_ranks_give_the_sum_of_all_units(mode: str, named: bool) -> None:
    members = OF_USERS if named else list(torch.arange(5)[:, None])
    wanted = [clipped_sum(copy.deepcopy(Net(use)), *inputs(1), members) for use in USES]
    for rank in run_distributed(sums_of_rank, 2, mode, named):
        for got, want in zip(rank, wanted, strict=True):
            assert_right(got, want)


def split_users(rank: int, _: int) -> list[str]:
    """What is said of units with rows on two ranks: at once, or in two batches of a step."""
    said = []
    x, y = (t[PARTS[rank]] for t in inputs())
    model, optimizer, criterion, _ = private(
        FSDP2Wrapper(Net(flattened)), "ghost_fsdp", 3, privacy_unit="users"
    )
    try:
        criterion(model(x, users=torch.tensor([0, 1, 2, 0, 3])[PARTS[rank]]), y).backward()
    except ValueError as error:
        said.append(str(error))
    for number, users in enumerate(([0, 1, 2, 3, 4], [5, 6, 7, 0, 8])):
        optimizer.signal_skip_step(number == 0)
        optimizer.zero_grad()
        criterion(model(x, users=torch.tensor(users)[PARTS[rank]]), y).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_unit_on_two_ranks_is_refused() -> None:
    for at_once, apart in run_distributed(split_users, 2):
        assert "several ranks have rows of the units [0]" in at_once
        assert "several physical batches of one step have rows of the units [0]" in apart


WRONG = {
    "negative numbers other than -1": {"users": torch.tensor([3, -2])},
    "has to be called with users=": {},
    "got (2,) torch.float32": {"users": torch.tensor([3.0, 4.0])},
    "no input of the model begins with that": {"users": torch.tensor([3, 4, 5], dtype=torch.int32)},
    "got (2,) torch.complex64": {"users": torch.tensor([3, 4], dtype=torch.complex64)},
    "got (2,) torch.uint64": {"users": torch.tensor([3, 4], dtype=torch.uint64)},
}


def refused_batches(rank: int, _: int, mode: str) -> tuple[list[str], list[Tensor]]:
    """What is said of batches that rank 1 refuses, and the sum of the next one."""
    said = []
    made = private(FSDP2Wrapper(Net(flattened)), mode, 3, privacy_unit="users")
    x, y = (t[PARTS[rank]] for t in inputs())
    for wanted, wrong in WRONG.items():
        progress(wanted)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            made[0](x, **(wrong if rank else {"users": torch.tensor([0, 1, 0])}))
        said.append(f"{caught.type.__name__}: {caught.value}")
    made[2](made[0](x, users=USERS[PARTS[rank]]), y).backward()
    made[1].step()
    return said, whole(made[1].params)


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_names_that_one_rank_refuses(mode: str) -> None:
    """All ranks say so, and go on."""
    (others, got), (own, _) = run_distributed(refused_batches, 2, mode)
    for wanted, here, there in zip(WRONG, own, others, strict=True):
        assert here.startswith("ValueError: ") and wanted in here
        assert there.startswith("RuntimeError: users was refused on another rank. rank 1: ")
        assert wanted in there
    assert_right(got, clipped_sum(Net(flattened), *inputs(), OF_USERS))


OTHERS = {"names": [0, 1, 0, 2, 2], "counts": [0, 0, 0, 1, 1]}


def replicated(rank: int, _: int, mode: str) -> list[str]:
    """What is said of equal rows that are other units' on rank 1."""
    said = []
    x, y = inputs()
    for case, others in OTHERS.items():
        progress(case)
        model = FSDP2Wrapper(Net(flattened)) if "fsdp" in mode else Net(flattened)
        layout = {"data_layout": "replicated"} if "fsdp" in mode else {}
        made = private(model, mode, 3, privacy_unit="users", **layout)
        with pytest.raises(ValueError, match="different batches") as caught:
            made[2](made[0](x, users=torch.tensor(others if rank else [0, 0, 1, 2, 2])), y)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk", "ghost_tp"])
def test_ranks_with_the_same_rows_have_the_same_units(mode: str) -> None:
    """Else norms of different units would be added up."""
    first, second = run_distributed(replicated, 2, mode)
    assert first == second and len(first) == len(OTHERS)


def one_without_gradient(rank: int, _: int, mode: str, named: bool) -> list[Tensor]:
    """The sum where rank 1 has one sample, whose loss counts for nothing."""
    kw = {"privacy_unit": "users"} if named else {}
    made = private(FSDP2Wrapper(Net(flattened)), mode, 3, **kw)
    x, y = (t[PARTS[rank][: 3 - 2 * rank]] for t in inputs())
    more = {"users": torch.arange(len(x)) + 10 * rank} if named else {}
    made[2](made[0](x, **more), torch.full_like(y, -100) if rank else y).backward()
    made[1].step()
    return whole(made[1].params)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_a_rank_whose_only_sample_has_no_gradient_goes_along(mode: str, named: bool) -> None:
    """There is nothing to check on it, and the check runs on all ranks."""
    want = clipped_sum(Net(flattened), *inputs(), list(torch.arange(3)[:, None]))
    for got in run_distributed(one_without_gradient, 2, mode, named):
        assert_right(got, want)


def with_peers(rank: int, _: int) -> str:
    """What is said where rank 3 alone, of two that hold the same rows, names a user of others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net(flattened)
    parallelize_module(net, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(net, mesh=mesh["dp"])
    model = private(net, "ghost_fsdp", 3, privacy_unit="users")[0]
    rows = PARTS[rank // 2]
    users = torch.tensor([7, 9]) if rank == 3 else USERS[rows]
    progress("a user of others")
    with pytest.raises(ValueError, match="several ranks") as caught:
        model(inputs()[0][rows], users=users)
    return str(caught.value)


def test_ranks_with_copies_of_the_rows_refuse_together() -> None:
    said = run_distributed(with_peers, 4)
    assert len(set(said)) == 1 and "rows of the units [7]" in said[0]
