"""Sample rates and expected batch sizes."""

from __future__ import annotations

import logging
from numbers import Real
from typing import Any

import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from opacus.utils.uniform_sampler import POISSON

logger = logging.getLogger(__name__)


def matching_sample_rate(data_loader: DataLoader[Any]) -> float:
    """The sample rate of Poisson sampling in place of `data_loader`'s sampling.

    See `DPDataLoader.from_data_loader`. A loader that has a rate of its own keeps it.
    """
    own = own_rate(data_loader)
    if own is not None:
        return own
    batch_sampler, size = data_loader.batch_sampler, len(data_loader.dataset)  # type: ignore
    if batch_sampler is None:
        raise ValueError("data_loader does not batch (batch_size=None); give it a batch_size")
    rate_of_a_pass = _rate_of_a_pass(data_loader)
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    if isinstance(sampler, SubsetRandomSampler):
        raise ValueError(
            "data_loader has a SubsetRandomSampler. Poisson sampling would draw from the whole "
            "data set; give the loader torch.utils.data.Subset(dataset, indices) instead"
        )
    if _is_uniform(sampler, size):
        return rate_of_a_pass
    batch_size = getattr(batch_sampler, "batch_size", None)
    rate = rate_of_a_pass if batch_size is None else min(1.0, batch_size / size)
    logger.warning(
        "The %s of data_loader is replaced by Poisson sampling, which is uniform over the data "
        "set; the sample rate is %g.",
        type(sampler).__name__,
        rate,
    )
    return rate


def _is_uniform(sampler: object, size: int) -> bool:
    """Whether one pass of `sampler` visits the whole data set, once."""
    if isinstance(sampler, (SequentialSampler, RandomSampler)):
        return len(sampler) == size and not getattr(sampler, "replacement", False)
    return isinstance(sampler, (DistributedSampler, *POISSON))


def warn_of_uneven_sampling(data_loader: DataLoader[Any]) -> None:
    """Warns if `data_loader`, which is kept, draws batches in another way than is counted."""
    drawn = getattr(data_loader, "batch_sampler", None)  # a loader of one's own has none
    if isinstance(data_loader.dataset, IterableDataset) or drawn is None:
        return
    sampler = getattr(drawn, "sampler", drawn)
    if not _is_uniform(sampler, len(data_loader.dataset)):  # type: ignore[arg-type]
        logger.warning(
            "The %s of data_loader may draw some samples more often than others, but privacy is "
            "counted as if each joined a batch with the same probability: with "
            "poisson_sampling=False that epsilon does not hold for the samples it favours. Use "
            "poisson_sampling=True, which replaces it, or weigh the losses instead.",
            type(sampler).__name__,
        )
    elif len(data_loader) > 1 and not isinstance(sampler, POISSON):
        logger.warning(
            "poisson_sampling=False keeps the batches of data_loader, but privacy is counted as if "
            "each sample joined each batch by a coin of its own: batches of a shuffled pass can "
            "cost several times as much (arXiv 2403.17673). Keep poisson_sampling=True, or count "
            "each pass as one step of sample rate 1."
        )


def sample_rate_of(data_loader: DataLoader[Any]) -> float:
    """Probability with which a sample is in a batch of ``data_loader``."""
    own = own_rate(data_loader)
    return _rate_of_a_pass(data_loader) if own is None else own


def own_rate(data_loader: DataLoader[Any]) -> float | None:
    """A loader's attribute ``sample_rate``, if it is a probability: that of sound is in hertz."""
    rate = getattr(data_loader, "sample_rate", None)
    return float(rate) if isinstance(rate, Real) and 0 < rate <= 1 else None


def _rate_of_a_pass(data_loader: DataLoader[Any]) -> float:
    """Where each sample is in one batch of a pass.

    Raises:
        ValueError: There are none.
    """
    if len(data_loader) == 0:
        raise ValueError("data_loader has no batches: its data set is empty or its batch too large")
    return 1 / len(data_loader)


def expected_batch_size_on_rank(
    data_loader: DataLoader[Any], sample_rate: float, distributed: bool, of_all: float | None = None
) -> float:
    """Expected number of samples of a batch on one rank; `of_all` ranks together, if given."""
    size = len(data_loader.dataset) * sample_rate if of_all is None else of_all  # type: ignore[arg-type]
    return size / dist.get_world_size() if distributed else size
