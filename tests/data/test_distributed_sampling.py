"""Sampling on several gloo ranks: who gets which sample, and no rank waits for another for ever."""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from opacus.data.sharding import shard_data_loader
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from tests.helpers.distributed import DistributedTestError, run_distributed


class Accumulator:
    """Stands for a DP optimizer; it communicates whenever it accumulates, as FSDP does."""

    def __init__(self) -> None:
        self.signals: list[bool] = []
        self.gathered: list[int] = []
        self.steps: list[list[int]] = []
        self.sizes: list[int] = []

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self.signals.append(do_skip)

    def step(self, batch: torch.Tensor) -> None:
        tag = torch.tensor([len(self.sizes), -len(self.sizes)])
        dist.all_reduce(tag, op=dist.ReduceOp.MAX)
        assert tag.sum() == 0, "ranks are at different physical batches"
        self.sizes.append(len(batch))
        self.gathered += batch.tolist()
        if not self.signals.pop(0):
            self.steps.append(self.gathered)
            self.gathered = []


def loader_of(size: int, rate: float, **kwargs: Any) -> DPDataLoader:
    generator = torch.Generator().manual_seed(0)  # the same on all ranks
    data = [{"x": torch.tensor(i)} for i in range(size)]
    return DPDataLoader(data, sample_rate=rate, generator=generator, distributed=True, **kwargs)


def accumulate(loader: DataLoader, largest: int, epochs: int = 1) -> Accumulator:
    optimizer = Accumulator()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=largest, optimizer=optimizer
    ) as physical:
        for _ in range(epochs):
            for batch in physical:
                optimizer.step(batch["x"] if isinstance(batch, dict) else batch[0])
    return optimizer


# What each rank does. One set of processes does it all, because starting them takes seconds.

# name: size of the data set, rate, largest physical batch, workers
POISSON = {
    "large": (60, 0.1, 2, 0),
    "large, workers": (60, 0.1, 2, 2),
    "often empty": (24, 0.08, 1, 0),
    "a rank without samples": (2, 0.4, 1, 0),
}
ORDINARY = ("sequential", "shuffled", "weighted")


def job(rank: int, world_size: int) -> dict:
    results: dict[str, Any] = {name: split(*case) for name, case in POISSON.items()}
    results |= {kind: share_out(rank, kind) for kind in ORDINARY}
    results["two epochs"] = accumulate(loader_of(40, 0.25), largest=2, epochs=2).steps
    results["after leaving early"] = leave_early()
    results["untouched"] = untouched()
    return results


def split(size: int, rate: float, largest: int, workers: int) -> dict:
    kwargs = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    expected = [b["x"].tolist() for b in loader_of(size, rate)]
    optimizer = accumulate(loader_of(size, rate, **kwargs), largest)
    return {"expected": expected, "steps": optimizer.steps, "sizes": optimizer.sizes}


def leave_early() -> list:
    loader = loader_of(40, 0.25, num_workers=2, multiprocessing_context="fork")
    optimizer = Accumulator()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as physical:
        for number, batch in enumerate(physical):
            optimizer.step(batch["x"])
            if number == 4:
                break
    return accumulate(loader, largest=2).steps


def share_out(rank: int, kind: str) -> dict:
    torch.manual_seed(rank)  # so that the order of a shuffled loader is not equal by chance
    data = TensorDataset(torch.arange(20))
    arguments: dict[str, Any] = {"batch_size": 7}
    if kind == "shuffled":
        arguments["shuffle"] = True
    if kind == "weighted":
        arguments["sampler"] = WeightedRandomSampler(torch.ones(20), 20, replacement=False)
    loader = shard_data_loader(DataLoader(data, **arguments))
    first = [batch[0].tolist() for batch in loader]
    assert len(loader) == len(first)
    physical = accumulate(loader, largest=2)
    return {"first": first, "second": physical.steps, "sizes": physical.sizes}


def untouched() -> bool:
    data = TensorDataset(torch.arange(20))
    loaders = [
        DataLoader(data, batch_size=4, sampler=DistributedSampler(data)),
        DPDataLoader(data, sample_rate=0.5, distributed=True),
        DataLoader(data, batch_size=None),
    ]
    return all(shard_data_loader(loader) is loader for loader in loaders)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict]:
    """Results of all ranks."""
    return run_distributed(job, request.param)


def parts(batch: list, largest: int) -> int:
    return max(1, -(-len(batch) // largest))


# Poisson sampling


def test_every_rank_yields_every_batch_in_its_own_share(ranks: list[dict]) -> None:
    batches = [rank["often empty"]["expected"] for rank in ranks]
    assert [len(b) for b in batches] == [12] * len(ranks)
    assert all([] in b for b in batches)
    seen = [set(chain(*b)) for b in batches]
    assert sum(map(len, seen)) == len(set().union(*seen)) > 0


@pytest.mark.parametrize("case", POISSON)
def test_ranks_run_equally_many_physical_batches(ranks: list[dict], case: str) -> None:
    largest = POISSON[case][2]
    results = [rank[case] for rank in ranks]
    assert all(result["steps"] == result["expected"] for result in results)
    assert all(max(result["sizes"]) <= largest for result in results)
    logical = zip(*(result["expected"] for result in results), strict=True)
    agreed = sum(max(parts(batch, largest) for batch in batches) for batches in logical)
    assert {len(result["sizes"]) for result in results} == {agreed}
    # Ranks left to themselves would have parted.
    alone = [sum(parts(batch, largest) for batch in result["expected"]) for result in results]
    assert max(alone) > min(alone) or case == "a rank without samples"


def test_epochs_differ(ranks: list[dict]) -> None:
    for steps in (rank["two epochs"] for rank in ranks):
        assert len(steps) == 8
        assert steps[:4] != steps[4:]


def test_leaving_early_on_all_ranks(ranks: list[dict]) -> None:
    assert {len(rank["after leaving early"]) for rank in ranks} == {4}


# Ordinary loaders


@pytest.mark.parametrize("kind", ORDINARY)
def test_each_sample_of_an_ordinary_batch_is_on_one_rank(ranks: list[dict], kind: str) -> None:
    results = [rank[kind] for rank in ranks]
    for epoch in ("first", "second"):
        shares = zip(*(result[epoch] for result in results), strict=True)
        batches = [list(chain(*share)) for share in shares]
        assert [len(batch) for batch in batches] == [7, 7, 6]
        assert sorted(chain(*batches)) == list(range(20))
    assert (results[0]["first"] == results[0]["second"]) == (kind == "sequential")


def test_uneven_shares_of_ordinary_batches_are_split_alike(ranks: list[dict]) -> None:
    sizes = [rank["sequential"]["sizes"] for rank in ranks]
    if len(ranks) == 3:  # batches of 7, 7, 6 are shares of 3 or 2: two physical batches, or one
        assert sizes == [[2, 1, 2, 1, 2], [1, 1, 1, 1, 2], [1, 1, 1, 1, 2]]
    assert len(set(map(len, sizes))) == 1


def test_loaders_that_may_know_about_ranks_are_left_alone(ranks: list[dict]) -> None:
    assert all(rank["untouched"] for rank in ranks)
    loader = DataLoader(TensorDataset(torch.arange(4)))
    assert shard_data_loader(loader) is loader  # there is one process only


# The launcher


def wait_for_the_other(rank: int, world_size: int) -> None:
    if rank == 0:
        threading.Event().wait()
    dist.barrier()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("no luck on this rank")
    dist.barrier()


def add(rank: int, world_size: int, amount: float) -> torch.Tensor:
    total = torch.tensor([rank + amount])
    dist.all_reduce(total)
    return total


def test_launcher_returns_each_rank_s_result() -> None:
    assert run_distributed(add, 2, 0.5) == [torch.tensor([2.0])] * 2


def test_launcher_reports_a_failure_at_once() -> None:
    with pytest.raises(DistributedTestError, match="no luck on this rank"):
        run_distributed(fail_on_one, 2)


@pytest.mark.slow
def test_launcher_dumps_the_stack_of_a_hang() -> None:
    with pytest.raises(DistributedTestError, match=r"hung.*(.|\n)*in wait_for_the_other"):
        run_distributed(wait_for_the_other, 2, timeout=20)
