"""Data loaders that sample as the privacy accounting assumes (Poisson sampling)."""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from opacus.data.collate import (
    CollateFn,
    CollateFnWithEmpty,
    dtype_safe,
    shape_safe,
    wrap_collate_with_empty,
)
from opacus.data.fixed import PaddedCollate, padded
from opacus.data.host_loader import HostLoader, loader_settings, switch_generator
from opacus.data.rates import matching_sample_rate, own_rate
from opacus.utils.groups import Groups
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

__all__ = [
    "CollateFnWithEmpty",
    "DPDataLoader",
    "dtype_safe",
    "shape_safe",
    "switch_generator",
    "wrap_collate_with_empty",
]

logger = logging.getLogger(__name__)

# Arguments of DataLoader that Poisson sampling decides on.
_SAMPLING_ARGUMENTS = ("batch_size", "shuffle", "sampler", "batch_sampler")


class DPDataLoader(HostLoader):
    """A `DataLoader` that samples by Poisson sampling and copes with empty batches.

    Guarantee: each sample is in each batch with probability `sample_rate`, independently of the
    other samples and batches. Batches therefore differ in size, and `batch_size` is but a mean.

    Args:
        dataset: map-style data set.
        sample_rate: probability with which a sample joins a batch, in (0, 1].
        collate_fn: as for `DataLoader`; empty batches never reach it (see `CollateFnWithEmpty`).
        drop_last: ignored with a warning; Poisson sampling has no last, smaller batch.
        generator: source of randomness for the sampling; the global CPU generator if `None`. With
            a generator, the batches do not depend on `num_workers`.
        distributed: this process is one rank of several; it draws from its own share of the data
            set (`DistributedUniformWithReplacementSampler`).
        batch_first: the batch dimension of collated tensors is the first (`True`) or the second.
        rand_on_empty: see `CollateFnWithEmpty`.
        steps: batches per epoch; by default 1 / `sample_rate`, rounded down.
        cyclic: no Poisson sampling but, in all passes, the same batches, which were drawn once.
        groups: of the items, dealt out once; batches are drawn from each in turn, by Poisson
            sampling at `groups` times the rate.
        max_batch_size: of all ranks together; of larger batches so many items stay, uniformly
            drawn, and smaller ones are filled up by rows of nobody (see `PaddedCollate`).
        **kwargs: the other arguments of `DataLoader`, but for those that choose samples.

    Raises:
        TypeError: for an argument that `DataLoader` does not have.
        ValueError: for `batch_size`, `shuffle`, `sampler` or `batch_sampler`, for an iterable data
            set, or for a rate out of range.
    """

    _is_followed = False  # whether the batches of another loader are taken for those of this one

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sample_rate: float,
        collate_fn: CollateFn | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        distributed: bool = False,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        steps: int | None = None,
        cyclic: bool = False,
        groups: int | None = None,
        max_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_map_style(dataset)
        kwargs = _without_sampling(kwargs)
        self.sample_rate = sample_rate
        self.distributed = distributed
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        size = len(dataset)  # type: ignore[arg-type]
        sampler: UniformWithReplacementSampler | DistributedUniformWithReplacementSampler
        if distributed:
            sampler = DistributedUniformWithReplacementSampler(
                total_size=size,
                sample_rate=sample_rate,
                generator=generator,
                steps=steps,
                cyclic=cyclic,
            )
        else:
            sampler = UniformWithReplacementSampler(
                num_samples=size,
                sample_rate=sample_rate,
                generator=generator,
                steps=steps,
                cyclic=cyclic,
            )
        if groups is not None:
            sampler.groups = Groups(groups, generator, shared=distributed)
        if drop_last:
            logger.warning("Ignoring drop_last: Poisson sampling has no last, smaller batch.")
        if isinstance(collate_fn, PaddedCollate):
            collate_fn = collate_fn.collate_fn
        collate: CollateFn = wrap_collate_with_empty(
            collate_fn=default_collate if collate_fn is None else collate_fn,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            dataset=dataset,
        )
        if max_batch_size is not None:
            ranks = getattr(sampler, "num_replicas", 1)
            sampler.most = math.ceil(max_batch_size / ranks)
            collate = padded(collate, dataset, sampler.most, getattr(sampler, "rank", 0))
        super().__init__(
            dataset=dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            generator=generator,
            **kwargs,
        )

    def __iter__(self) -> Any:
        if not self.in_order:
            return super().__iter__()
        self._sizes = sizes = deque()
        return self._tell_sizes(super().__iter__(), sizes)

    def _tell_sizes(self, batches: Iterator[Any], sizes: deque[int]) -> Iterator[Any]:
        """Say of each batch that is delivered how many items were drawn for it."""
        draws: Any = getattr(self.batch_sampler, "draws", None)
        for batch in batches:
            if draws is not None and sizes:
                items = max(sizes.popleft(), int(self.rand_on_empty))
                draws.deliver(items, batch=batch)
            yield batch

    @classmethod
    def from_data_loader(
        cls,
        data_loader: DataLoader[Any],
        *,
        distributed: bool = False,
        generator: torch.Generator | None = None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_rate: float | None = None,
        cyclic: bool = False,
        groups: int | None = None,
        max_batch_size: int | None = None,
    ) -> DPDataLoader:
        """Makes a loader like `data_loader`, but with Poisson sampling.

        The sample rate is 1 / `len(data_loader)`, so that the mean batch size and the number of
        steps stay; a loader with a `sample_rate` of its own keeps that and its length. A sampler
        that is not uniform over the data set cannot stay; it is replaced with a warning, and the
        rate is then the batch size over the size of the data set.

        Args:
            data_loader: loader of batches over a map-style data set.
            distributed: see `DPDataLoader`.
            generator: source of randomness; by default that of `data_loader`.
            batch_first: see `DPDataLoader`.
            rand_on_empty: see `CollateFnWithEmpty`.
            sample_rate: the rate instead, a public number; an epoch has 1 / `sample_rate` steps.
            cyclic, groups, max_batch_size: see `DPDataLoader`.

        Raises:
            ValueError: if the data set is iterable or empty, if `data_loader` does not batch, or
                if it has a `SubsetRandomSampler` (samples left out would be drawn).
        """
        _check_map_style(data_loader.dataset)
        settings = loader_settings(data_loader)
        if generator is not None:
            settings["generator"] = generator
        steps = None
        if sample_rate is None:
            steps = None if own_rate(data_loader) is None else len(data_loader)
            sample_rate = matching_sample_rate(data_loader)
        made = cls(
            dataset=data_loader.dataset,
            sample_rate=sample_rate,
            steps=steps,
            cyclic=cyclic,
            groups=groups,
            max_batch_size=max_batch_size,
            drop_last=data_loader.drop_last,
            distributed=distributed,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            **settings,
        )
        if isinstance(data_loader, DPDataLoader) and generator is None:
            made._draw_together(data_loader)
        return made

    def _draw_together(self, other: DPDataLoader) -> None:
        """Follow the batches of either loader, if a step may be of either.

        Lightning, say, iterates over the loader of a data module that ``make_private`` was given.
        Not where the data are split once for all passes: each loader has a split of its own, and an
        item of an early part of one may be in a late part of the other.
        """
        own: Any = self.batch_sampler
        theirs: Any = other.batch_sampler
        ways = [
            (type(s), s.sample_rate, getattr(s, "num_replicas", 1), s.most) for s in (own, theirs)
        ]
        split = any(s.cyclic or s.groups is not None for s in (own, theirs))
        taken = theirs.draws.started or other._is_followed
        if ways[0] == ways[1] and not (split or taken):
            own.draws, other._is_followed = theirs.draws, True


def _check_map_style(dataset: Dataset[Any]) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            "Poisson sampling is not supported for an IterableDataset or a data set without a "
            "length: any sample must be available at any time. Use a map-style data set"
        )


def _without_sampling(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Checks arguments meant for `DataLoader` and drops those that say nothing."""
    known = inspect.signature(DataLoader.__init__).parameters
    for name, value in kwargs.items():
        if name not in known:
            raise TypeError(f"DPDataLoader got an unexpected argument {name!r}")
        says_nothing = value is None or value is False or value == known[name].default
        if name in _SAMPLING_ARGUMENTS and not says_nothing:
            raise ValueError(
                f"DPDataLoader samples by Poisson sampling and takes no {name} (got {value!r}); "
                "set sample_rate, the mean batch size over the size of the data set"
            )
    return {name: value for name, value in kwargs.items() if name not in _SAMPLING_ARGUMENTS}
