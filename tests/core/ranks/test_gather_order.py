"""A branch that is an FSDP2 unit of its own: refused on all ranks where only some run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opacus.core.ranks.gather_order import GatherOrder
from opacus.core.ranks.meeting import Meetings
from tests.helpers.distributed import DistributedTestError, progress, run_distributed
from tests.helpers.fsdp_run import Run


class Branches(nn.Module):
    """Blocks of one size, of which some may be left out, and another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.expert = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 3)
        self.skip: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if f"blocks.{number}" not in self.skip:
                x = torch.tanh(block(x))
        if "expert" not in self.skip:
            x = x + self.expert(x)
        return self.head(x)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def build() -> nn.Module:
    model = Branches()
    for unit in (*model.blocks, model.expert):
        fully_shard(unit)
    fully_shard(model)
    return model


def step(run: Run, *skip: str) -> None:
    run.model.skip = skip
    run.step()


# Mode, the branch that rank 1 leaves out, where it comes instead.
FIRST = [
    ("ghost_fsdp", "expert", "the end of the model"),
    ("ghost_fsdp_bk", "expert", "the end of the model"),
    # Units of one size: without the check their parameters would be mixed up.
    ("ghost_fsdp", "blocks.1", "blocks.2"),
]


def first_steps(rank: int, world_size: int) -> list[str]:
    said = []
    for mode, branch, _ in FIRST:
        progress((mode, branch))
        run = Run(build, mode, rank)
        with pytest.raises(RuntimeError, match="ranks run different FSDP2 units") as caught:
            step(run, *([branch] if rank == 1 else []))
        said.append(str(caught.value))
    return said


def check_first_steps(ranks: list[list[str]]) -> None:
    for rank, said in enumerate(ranks):
        for text, (_, branch, instead) in zip(said, FIRST, strict=True):
            assert f"this is rank {rank}" in text
            assert f"rank 0 at '{branch}'; rank 1 at '{instead}'" in text


def test_the_first_pass_is_refused_on_all_ranks() -> None:
    check_first_steps(run_distributed(first_steps, 2))


@pytest.mark.gpu
@two_gpus
def test_the_first_pass_is_refused_on_gpus() -> None:
    check_first_steps(run_distributed(first_steps, 2, backend="nccl"))


def later_step(rank: int, world_size: int) -> None:
    GatherOrder.WAIT = 1.0
    run = Run(build, "ghost_fsdp", rank)
    step(run)
    step(run, *(["expert"] if rank == 1 else []))


def test_a_later_pass_names_rank_and_unit_everywhere() -> None:
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(later_step, 2)
    first, second = str(caught.value).split("rank 1 raised:")
    for said in (first, second):
        assert "rank 1 at 'the end of the model'; rank 0 did not come there within 1 s" in said
        assert "'expert' comes next there" in said


def together(rank: int, world_size: int) -> list[list[int]]:
    return [meetings(Run(build, mode, rank)) for mode in ("ghost_fsdp", "ghost_fsdp_bk")]


def meetings(run: Run) -> list[int]:
    """How many each step has when all ranks leave the same units out."""
    run.private.isolation.on = False  # ranks meet for that, too, where passes take another course
    met, meet = [0], Meetings.meet

    def counted(meetings: Meetings, *args: Any) -> Any:
        met[0] += "/units/" in meetings._prefix
        return meet(meetings, *args)

    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meetings, "meet", counted)
        for skip in ((), (), ("expert",), ("blocks.0", "blocks.2"), ("blocks.1",), (), ()):
            met[0] = 0
            step(run, *skip)
            counts.append(met[0])
        met[0] = 0
        run.private.eval()
        with torch.no_grad():
            run.private(run.x)
            run.private(run.x)
        counts.append(met[0])
    return counts


# Four units and the end; then one for each place where the usual order is left.
MEETINGS = [5, 0, 1, 2, 1, 0, 0, 5]


def test_ranks_may_leave_a_unit_out_together() -> None:
    assert run_distributed(together, 2) == [[MEETINGS, MEETINGS]] * 2


@pytest.mark.gpu
@two_gpus
def test_ranks_may_leave_a_unit_out_together_on_gpus() -> None:
    assert run_distributed(together, 2, backend="nccl") == [[MEETINGS, MEETINGS]] * 2
