"""Sharing out the batches of an ordinary loader among the ranks of a process group."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from opacus.data_loader import loader_settings, wrap_collate_with_empty

logger = logging.getLogger(__name__)

# Samplers whose order is known to be equal on all ranks once their generators are.
_KNOWN_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class ShardedBatchSampler(Sampler[list[int]]):
    """Yields one rank's part of each batch of `batch_sampler`.

    Rank r of W gets samples r, r + W, ... of the batch. Together the ranks see each batch exactly
    once, without repetition; parts differ in size by at most one and may be empty. Every rank must
    iterate equally often, and `batch_sampler` must yield the same batches on all of them.

    Args:
        batch_sampler: what a single process would iterate.
        num_replicas: number of ranks, W.
        rank: this rank, r.
    """

    def __init__(self, batch_sampler: Sampler[list[int]], num_replicas: int, rank: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_replicas = num_replicas
        self.rank = rank

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batch_sampler:
            yield list(batch)[self.rank :: self.num_replicas]


def shard_data_loader(data_loader: DataLoader[Any]) -> DataLoader[Any]:
    """Makes each rank of the default process group load its own part of each batch.

    Without this, a loader that knows nothing of ranks yields every sample on every rank: the batch
    is as many times larger as there are ranks, and each sample counts as often. Must be called on
    all ranks (the seed of a random order is agreed on).

    Args:
        data_loader: loader of batches. It is returned as it is if there is one rank only, or if
            its sampler is none of torch's samplers for one process; such samplers
            (`DistributedSampler`, Opacus' own, a user's) may well know about ranks.

    Returns:
        A loader of equally many batches. Its parts of `batch_size` are that of `data_loader` over
        the number of ranks.
    """
    batch_sampler = data_loader.batch_sampler
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1 or not isinstance(batch_sampler, BatchSampler):
        return data_loader
    if not isinstance(batch_sampler.sampler, _KNOWN_SAMPLERS):
        return data_loader
    logger.warning(
        "The data loader has no distributed sampler; each of the %d ranks gets its own part of "
        "each batch.",
        ranks,
    )
    whole = copy.copy(batch_sampler)
    if hasattr(whole.sampler, "generator"):
        whole.sampler = copy.copy(whole.sampler)
        whole.sampler.generator = _shared_generator(whole.sampler.generator)
    settings = loader_settings(data_loader)
    settings["collate_fn"] = wrap_collate_with_empty(
        collate_fn=data_loader.collate_fn, dataset=data_loader.dataset
    )
    sampler = ShardedBatchSampler(whole, ranks, dist.get_rank())
    return DataLoader(data_loader.dataset, batch_sampler=sampler, **settings)


def _shared_generator(generator: torch.Generator | None) -> torch.Generator:
    """A generator in the same state on all ranks, seeded from rank 0's `generator`."""
    seed = torch.randint(2**62, (1,), generator=generator).to(communication_device())
    dist.broadcast(seed, src=0)
    return torch.Generator().manual_seed(int(seed))


def communication_device() -> torch.device:
    """A device whose tensors the default process group can communicate; the CPU if it can."""
    # Such as "cpu:gloo,cuda:nccl".
    devices = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device(devices[0], torch.accelerator.current_device_index())
