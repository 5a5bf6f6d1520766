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
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from opacus.core.privacy.noise import draw_seed
from opacus.core.ranks.data_layout import check_data_layout
from opacus.core.ranks.mesh import ModelRanks
from opacus.core.step.modes import Mode
from opacus.data.collate import wrap_collate_with_empty
from opacus.data.host_loader import HostLoader, loader_settings, switch_generator
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

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
    ranks = _world_size()
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
        whole.sampler.generator = shared_generator(whole.sampler.generator)
    settings = loader_settings(data_loader)
    settings["collate_fn"] = wrap_collate_with_empty(
        collate_fn=data_loader.collate_fn, dataset=data_loader.dataset
    )
    sampler = ShardedBatchSampler(whole, ranks, dist.get_rank())
    return HostLoader(data_loader.dataset, batch_sampler=sampler, **settings)


def repeat_data_loader(data_loader: DataLoader[Any]) -> DataLoader[Any]:
    """Makes every rank draw the same batches, in the random order of rank 0.

    Must be called on all ranks. A loader with a sampler of another kind is returned as it is.

    Args:
        data_loader: loader of batches; with a Poisson sampler (of ours) that one is changed.
    """
    batch_sampler: Any = data_loader.batch_sampler
    if isinstance(batch_sampler, UniformWithReplacementSampler):
        batch_sampler.share_key()
        return data_loader
    sampler = getattr(batch_sampler, "sampler", None)
    if not isinstance(sampler, _KNOWN_SAMPLERS) or not hasattr(sampler, "generator"):
        return data_loader
    generator = shared_generator(sampler.generator)
    return switch_generator(data_loader=data_loader, generator=generator)


def follow_mesh(data_loader: DataLoader[Any], ranks: ModelRanks) -> None:
    """Makes a private loader deal to the data axes alone, if these are not all ranks.

    Ranks along a tensor-parallel axis then draw the same samples. Must be called on all ranks.

    Args:
        data_loader: its sampler is changed.
        ranks: places along the data axes.
    """
    sampler: Any = data_loader.batch_sampler
    rank, num_replicas = ranks.index, ranks.count
    if num_replicas == dist.get_world_size():
        return
    if isinstance(sampler, DistributedUniformWithReplacementSampler):
        sampler.num_samples = len(range(rank, sampler.total_size, num_replicas))
    elif not isinstance(sampler, ShardedBatchSampler):
        return
    sampler.rank, sampler.num_replicas = rank, num_replicas


def shared_generator(generator: torch.Generator | None) -> torch.Generator:
    """A generator in the same state on all ranks, seeded from rank 0's `generator`."""
    seed = torch.tensor([draw_seed(generator)], device=communication_device())
    dist.broadcast(seed, src=0)
    return torch.Generator().manual_seed(int(seed))


def choose_data_layout(
    data_layout: str,
    data_loader: DataLoader[Any],
    *,
    mode: Mode,
    secure_mode: bool,
    counts_samples: bool = False,
) -> str:
    """What ``data_layout`` means for this loader: ``"sharded"`` or ``"replicated"``.

    ``"auto"`` is sharded: a loader whose sampler knows nothing of ranks is dealt out to them.
    What ranks are fed is compared in the first batch.

    Args:
        data_layout: as given to `make_private`.
        data_loader: as given to `make_private`.
        mode: the grad sample mode.
        secure_mode: whether random numbers come from the operating system.
        counts_samples: whether a statistic of the samples is summed over ranks besides gradients.

    Raises:
        ValueError: The layout is unknown, contradicts the sampler, or is not possible.
    """
    check_data_layout(data_layout)
    if mode.parallelism != "fsdp" and data_layout != "auto":
        raise ValueError(
            f"data_layout={data_layout!r} is for models sharded by FSDP2; leave it out with this "
            "grad_sample_mode"
        )
    if mode.parallelism != "fsdp" or _world_size() == 1:
        return "sharded"
    batch_sampler = data_loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    deals = isinstance(batch_sampler, _DEALING) or isinstance(sampler, _DEALING)
    if data_layout == "replicated" and deals:
        raise ValueError(
            "data_layout='replicated', but the loader's sampler gives each rank its own samples "
            f"({type(sampler).__name__}): use an ordinary sampler, or data_layout='sharded'"
        )
    if data_layout == "replicated" and counts_samples:
        raise ValueError(
            "data_layout='replicated' would count each sample once a rank in the private quantile "
            "that moves the clipping norm: use data_layout='sharded'"
        )
    if data_layout == "replicated" and secure_mode:
        raise ValueError(
            "data_layout='replicated' needs the same random numbers on all ranks, which "
            "secure_mode=True rules out"
        )
    return "replicated" if data_layout == "replicated" else "sharded"


# Samplers that give each rank its own samples.
_DEALING = (DistributedSampler, DistributedUniformWithReplacementSampler, ShardedBatchSampler)


def _world_size() -> int:
    ready = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if ready else 1


def communication_device() -> torch.device:
    """A device whose tensors the default process group can communicate; the CPU if it can."""
    # Such as "cpu:gloo,cuda:nccl".
    devices = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return torch.device(devices[0], torch.accelerator.current_device_index())
