"""One rank's batch fails: all ranks say so, release nothing of the step, and can go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus.core.platform.torch_internals import default_store
from opacus.core.ranks.meeting import say_the_end
from opacus.core.ranks.votes import Votes
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from tests.helpers import oracle
from tests.helpers.distributed import attempt, progress, run_distributed
from tests.helpers.failures import B, Training, batch, build, failing, want

MODES = ["hooks", "functorch", "ew", "ghost", "ghost_bk", "flash_bk"]
GHOST = MODES[3:]
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "own": DifferentiallyPrivateDistributedDataParallel,
    "torch": DistributedDataParallel,
}
# What the failing rank says, in all modes or in ghost modes.
PLACES = {
    "backward": "backward",
    "out of memory": "out of memory",
    "coupled": "is not its own, first at",
}
OF_GHOST = {
    "norms": "in the package",
    "criterion refused": "the criterion mixes samples",
    "changed gradients": "were changed or added between",
}
CASES = [
    (mode, wrapper, place)
    for mode in MODES
    for wrapper in WRAPPERS
    for place in {**PLACES, **(OF_GHOST if mode in GHOST else {})}
]
FAILING = 1  # the rank


def train(mode: str, wrapper: str, rank: int, world_size: int) -> Training:
    net = build()
    training = Training(
        mode,
        WRAPPERS[wrapper](net),
        data_loader=DataLoader(TensorDataset(*batch(9, 4 * B)), batch_size=2 * B),
    )
    training.net = net
    return training


def said_by(training: Training, rank: int, place: str) -> str:
    with failing(place if rank == FAILING else ""):
        try:
            training.step(batch(10 + rank))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fails_and_goes_on(rank: int, world_size: int, case: tuple[str, str, str]) -> Any:
    """What a rank says of the failure, steps that were counted, and the sum of a good step."""
    mode, wrapper, place = case
    training = train(mode, wrapper, rank, world_size)
    said, counted = said_by(training, rank, place), training.steps
    training.optimizer.zero_grad()
    training.step(batch(20 + rank))
    sums = [p.grad.detach().clone() for p in training.net.parameters()]
    return said, counted, training.steps, sums


def cases_of(world_size: int) -> list[tuple[str, str, str]]:
    """All of them on two ranks."""
    return [case for case in CASES if world_size == 2 or case[0] in ("hooks", "ghost_bk")]


def every_case(rank: int, world_size: int) -> dict[Any, Any]:
    cases = cases_of(world_size)
    return {case: attempt(fails_and_goes_on, rank, world_size, case) for case in cases}


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_raise_and_can_go_on(world_size: int) -> None:
    data = [torch.cat(parts) for parts in zip(*(batch(20 + r) for r in range(world_size)), strict=True)]  # fmt: skip
    exact = want(build(), (data[0], data[1]))
    ranks = run_distributed(every_case, world_size)
    for case in cases_of(world_size):
        for rank, found in enumerate(one[case] for one in ranks):
            assert not isinstance(found, str), found
            said, before, after, sums = found
            own = {**PLACES, **OF_GHOST}[case[2]]
            if rank == FAILING:
                assert own in said, (case, said)
            else:
                whose = rf"nothing of this step was released: rank {FAILING} refused its batch: "
                # Of torch's own backward pass no more is known than that it failed.
                reason = "its backward pass failed|" if case[0] not in GHOST else ""
                assert re.search(f"{whose}.*({reason}{own})", said), (case, said)
            assert (before, after) == (0, 1), case
            for got, total in zip(sums, exact, strict=True):
                assert oracle.relative_error(got, total) < 1e-5, case


def adaptive(rank: int, world_size: int) -> list[str]:
    """A rank fails before the count of unclipped samples, which ranks add up."""
    made = PrivacyEngineAdaptiveClipping().make_private(
        module=DifferentiallyPrivateDistributedDataParallel(net := build()),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(*batch(9, 4 * B)), batch_size=2 * B),
        noise_multiplier=0.05, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode="ghost",
    )  # fmt: skip
    said = []
    for place in ("norms", "", "backward", ""):
        progress(place)
        made[1].zero_grad()
        try:
            with failing(place if rank == FAILING else ""):
                x, y = batch(rank)
                made[2](made[0](x), y).backward()
                made[1].step()
            said.append(f"C is {float(made[1].max_grad_norm)}")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_adaptive_clipping_does_not_wait() -> None:
    first, second = run_distributed(adaptive, 2)
    for place in (0, 2):
        assert second[place].startswith("Error: ")
        assert "rank 1 refused its batch: Error" in first[place]
    assert first[1] == second[1] != "C is 1.0" and first[3] == second[3] != first[1]
    assert first[1].startswith("C is")


def leaves(rank: int, world_size: int) -> tuple[str, float]:
    """The process of a rank ends in the middle of training."""
    training = train("hooks", "own", rank, world_size)
    training.step(batch(rank))
    began = time.monotonic()
    if rank == FAILING:
        say_the_end(default_store(), rank)
        return "", 0.0
    training.optimizer.zero_grad()
    return said_by(training, rank, ""), time.monotonic() - began


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    assert Votes.WAIT > 300
    (said, seconds), _ = run_distributed(leaves, 2)
    assert "nothing of this step was released: rank 1 has ended" in said and seconds < 60
