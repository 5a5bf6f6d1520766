"""An error in a backward pass under FSDP2: the next step is as if there had been none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from opacus.core.platform import fsdp_passes
from opacus.core.ranks.recovery import Recovery
from opacus.core.ranks.reduction import ShardedSink
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import DistributedTestError, progress, run_distributed
from tests.helpers.fsdp_run import Run

BLOCKS = 3


class Fuse(torch.autograd.Function):
    """An identity whose backward fails when it is called for the ``countdown``-th time."""

    countdown: ClassVar[int] = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Fuse.countdown -= 1
        if Fuse.countdown == 0:
            raise MemoryError("no room")
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Fuse.apply(self.layer(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Failing(Run):
    """Steps of which some fail in the backward pass."""

    def __init__(self, mode: str, rank: int, deferred: bool = False) -> None:
        super().__init__(
            lambda: FSDP2Wrapper(Model()), mode, rank, momentum=0.9, deferred_norm=deferred
        )

    def fail(self, at: int) -> None:
        Fuse.countdown = at
        with pytest.raises(MemoryError, match="no room"):
            self.step()
        assert all(p.grad is None for p in self.model.parameters())
        # Sharded again: what a handler may look at or save.
        assert all(hasattr(p, "full_tensor") for p in self.model.parameters())
        Fuse.countdown = 0

    def weights(self) -> list[Tensor]:
        return [p.full_tensor().detach() for p in self.model.parameters()]


# In the first backward pass, and in the second one, if there is one.
PLACES = {"ghost_fsdp": (1, 3, 4, 6), "ghost_fsdp_bk": (1, 3)}


def every_case(rank: int, world_size: int) -> list[list[list[Tensor]]]:
    ends = [with_and_without(rank, mode, deferred=False) for mode in PLACES]
    ends += [ends_of(rank, fails_while_reducing), ends_of(rank, fails_unwatched, steps=2)]
    before_213()
    return ends + [with_and_without(rank, mode, deferred=True) for mode in PLACES]


def before_213() -> None:
    """Let FSDP2 have nothing of its own to drop a pass with, as in older versions of torch."""
    if hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state


def with_and_without(rank: int, mode: str, deferred: bool) -> list[list[Tensor]]:
    """Weights after two steps, and with a failure at each place before each of them."""
    ends = []
    for at in (0, *PLACES[mode]):
        progress((mode, deferred, at))
        run = Failing(mode, rank, deferred)
        for _ in range(2):
            if at:
                run.fail(at)
            run.step()
        ends.append(run.weights())
    return ends


def check(ends: list[list[Tensor]]) -> None:
    untouched, *others = ends
    for end in others:
        for a, b in zip(end, untouched, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def ends_of(rank: int, fail: Callable[[Failing], None], steps: int = 1) -> list[list[Tensor]]:
    """The same for a single backward pass, with and without a failure between two steps."""
    ends = []
    for fails in (False, True):
        run = Failing("ghost_fsdp_bk", rank)
        run.step()
        if fails:
            with pytest.raises(MemoryError, match="no room"):
                fail(run)
            Fuse.countdown = 0
        for _ in range(steps):
            run.step()
        ends.append(run.weights())
    return ends


def fails_while_reducing(run: Failing) -> None:
    """In what a single backward pass does after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedSink, "_land", _no_room)
        run.step()


def fails_unwatched(run: Failing) -> None:
    """In the backward pass of a loss that the criterion did not make."""
    Fuse.countdown = 2
    run.private(run.x).sum().backward()


def _no_room(*args: Any) -> None:
    raise MemoryError("no room")


def test_the_next_step_is_as_usual() -> None:
    for cases in run_distributed(every_case, 2):
        for ends in cases:
            check(ends)


@pytest.mark.gpu
@two_gpus
def test_the_next_step_is_as_usual_on_gpus() -> None:
    for cases in run_distributed(every_case, 2, backend="nccl"):
        for ends in cases:
            check(ends)


def one_rank_fails(rank: int, world_size: int) -> None:
    Recovery.WAIT = 1.0
    run = Failing("ghost_fsdp", rank)
    run.step()
    if rank == 0:
        run.fail(BLOCKS + 1)
    run.step()


def test_a_failure_on_one_rank_alone_is_said() -> None:
    said = r"failed on rank 0 \(MemoryError: no room\), but not on ranks \[1\].*last checkpoint"
    with pytest.raises(DistributedTestError, match=said):
        run_distributed(one_rank_fails, 2)


def fail_elsewhere(rank: int) -> list[str]:
    run, said = Failing("ghost_fsdp", rank), []
    run.private._recovery._position = lambda: rank  # as if a rank had reduced more
    run.step()
    run.fail(BLOCKS + 1)
    for _ in range(2):  # it stays so
        with pytest.raises(RuntimeError, match="at other places on other ranks") as caught:
            run.step()
        said.append(str(caught.value))
    return said


def in_unknown_torch(rank: int) -> str:
    run = Failing("ghost_fsdp", rank)
    run.step()
    before_213()
    Fuse.countdown = BLOCKS + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_passes, "_drop_pass", _is_different)
        with pytest.raises(MemoryError):
            run.step()
    with pytest.raises(RuntimeError) as caught:
        run.step()
    return str(caught.value)


def _is_different(state: Any) -> None:
    raise AttributeError("_comm_ctx")


def where_it_cannot_go_on(rank: int, world_size: int) -> tuple[list[str], str]:
    return fail_elsewhere(rank), in_unknown_torch(rank)


def test_where_it_cannot_go_on_that_is_said() -> None:
    for rank, (said, old_torch) in enumerate(run_distributed(where_it_cannot_go_on, 2)):
        assert said[0] == said[1] and f"on rank {rank} (MemoryError" in said[0]
        assert "a backward pass failed (MemoryError: no room), and FSDP2 of torch" in old_torch
        assert old_torch.endswith("resume from the last checkpoint")
