"""Data loaders that sample as the privacy accounting assumes (Poisson sampling)."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from opacus.core.privacy.noise import device_of
from opacus.utils.empty_batch import blank_batch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

logger = logging.getLogger(__name__)

CollateFn = Callable[[list[Any]], Any]
PoissonSampler = UniformWithReplacementSampler | DistributedUniformWithReplacementSampler

# What a loader is made of, apart from what it samples from and how.
_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
# Arguments of DataLoader that Poisson sampling decides on.
_SAMPLING_ARGUMENTS = ("batch_size", "shuffle", "sampler", "batch_sampler")


def shape_safe(x: Any) -> tuple[int, ...]:
    """The shape of `x`, or `()` if it has none."""
    return getattr(x, "shape", ())


def dtype_safe(x: Any) -> torch.dtype | type:
    """The dtype of `x`, or its type if it has none."""
    return getattr(x, "dtype", type(x))


def loader_settings(data_loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments that rebuild `data_loader`, but for its data set and its sampling."""
    return {name: getattr(data_loader, name) for name in _SETTINGS}


class CollateFnWithEmpty:
    """A collate function that also knows what an empty batch looks like.

    Other batches go through `collator_fn` unchanged. A batch of no samples gets the structure of
    the others, with size 0 in the batch dimension (`opacus.utils.empty_batch` has the rules). The
    structure is learned when it is first needed, from one sample that is collated once and twice:
    the first of `dataset`, or else the first that has passed through. Learning leaves the global
    random state of torch as it was. Each worker process learns for itself.

    Guarantee: an empty batch carries nothing of any sample's content.

    Args:
        collator_fn: the collate function to wrap; `None` returns the list of samples as it is.
        batch_first: the batch dimension of collated tensors is the first (`True`) or the second.
        rand_on_empty: return a made-up batch of one sample, random zeros and ones, instead of an
            empty one, for models that cannot run on no samples. The made-up sample is clipped and
            summed like a real one. Its gradient depends on no data, so the privacy guarantee
            holds, but it is an error in the update that an empty batch would not make.
        sample_empty_shapes: shapes of a flat list of tensors to fall back on if there is neither
            a data set nor a first sample yet.
        dtypes: their dtypes.
        dataset: map-style data set whose first sample shows the structure.
    """

    def __init__(
        self,
        collator_fn: CollateFn | None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
        dtypes: Sequence[torch.dtype | type] | None = None,
        *,
        dataset: Dataset[Any] | None = None,
    ) -> None:
        self.wrapped_collator_fn = collator_fn
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        self.sample_empty_shapes = sample_empty_shapes
        self.dtypes = dtypes
        self.dataset = dataset
        self.first_batch: Any = None  # blank; None until an empty batch has been asked for
        self._seen_samples = False
        self._first_sample: Any = None  # kept only where there is no data set

    def __call__(self, batch: list[Any]) -> Any:
        """Collates `batch`, a list of samples that may be empty."""
        if len(batch) == 0:
            return self._empty_batch()
        if not self._seen_samples:
            self._seen_samples = True
            if self.dataset is None:
                self._first_sample = copy.deepcopy(batch[0])  # collate functions may change theirs
        return self._collate(batch)

    def _collate(self, batch: list[Any]) -> Any:
        return batch if self.wrapped_collator_fn is None else self.wrapped_collator_fn(batch)

    def _empty_batch(self) -> Any:
        if self.first_batch is None:
            if not self._seen_samples:
                if self.dataset is None:
                    return self._fallback()
                logger.warning("First batch is empty. Its structure is learned from dataset[0].")
            one, two = self._small_batches()
            self.first_batch = self._blank(one, two)
        # A copy, because whoever gets it may change it.
        return self._blank(self.first_batch, self.first_batch)

    def _blank(self, one: Any, two: Any) -> Any:
        return blank_batch(one, two, batch_first=self.batch_first, random=self.rand_on_empty)

    def _small_batches(self) -> tuple[Any, Any]:
        """A batch of one sample and a batch of two."""
        with torch.random.fork_rng(devices=[]):
            one = self._collate([self._sample()])
            two = self._collate([self._sample(), self._sample()])
        return one, two

    def _sample(self) -> Any:
        return copy.deepcopy(self._first_sample) if self.dataset is None else self.dataset[0]

    def _fallback(self) -> list[Any]:
        logger.warning(
            "First batch is empty, and there is no data set to learn its structure from. "
            "A list of tensors is used; pass `dataset` if the other batches are not like that."
        )
        shapes, dtypes = self.sample_empty_shapes or (), self.dtypes or ()
        kinds: Any = zip(shapes, dtypes, strict=False)
        return [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]


def wrap_collate_with_empty(
    *,
    collate_fn: CollateFn | None,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype | type] | None = None,
    dataset: Dataset[Any] | None = None,
) -> CollateFnWithEmpty:
    """Makes `collate_fn` work on empty batches; see `CollateFnWithEmpty` for the arguments."""
    if isinstance(collate_fn, CollateFnWithEmpty):
        collate_fn = collate_fn.wrapped_collator_fn
    return CollateFnWithEmpty(
        collate_fn,
        batch_first=batch_first,
        rand_on_empty=rand_on_empty,
        sample_empty_shapes=sample_empty_shapes,
        dtypes=dtypes,
        dataset=dataset,
    )


class HostLoader(DataLoader[Any]):
    """A `DataLoader` that draws where its generators are, whatever the default device is.

    Torch's own draws on the default device: after `torch.set_default_device("cuda")` it fails with
    a generator on the CPU, and shuffles with none on the GPU only.
    """

    # Sizes of the batches that the pass begun last has drawn and not delivered.
    _sizes: deque[int] | None = None

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        return _OnDevice(sampler, device_of(generator_of(sampler) or self.generator), self)

    def __iter__(self) -> Any:
        with torch.device(device_of(self.generator)):  # of the seed of the workers
            return super().__iter__()


class _OnDevice(Sampler[Any]):
    """`sampler`, which finds `device` to be the default one; the sizes of batches are noted."""

    def __init__(self, sampler: Any, device: torch.device, loader: HostLoader) -> None:
        self.sampler, self.device, self.loader = sampler, device, loader

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        with torch.device(self.device):
            return self._draw(iter(self.sampler), self.loader._sizes)

    def _draw(self, drawn: Iterator[Any], sizes: deque[int] | None) -> Iterator[Any]:
        while True:
            with torch.device(self.device):
                item = next(drawn, _END)
            if item is _END:
                return
            if sizes is not None:
                sizes.append(len(item))
            yield item


_END = object()


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator of a sampler, or of the one that it draws from."""
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None


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
        **kwargs: the other arguments of `DataLoader`, but for those that choose samples.

    Raises:
        TypeError: for an argument that `DataLoader` does not have.
        ValueError: for `batch_size`, `shuffle`, `sampler` or `batch_sampler`, for an iterable data
            set, or for a rate out of range.
    """

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
        **kwargs: Any,
    ) -> None:
        _check_map_style(dataset)
        kwargs = _without_sampling(kwargs)
        self.sample_rate = sample_rate
        self.distributed = distributed
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        size = len(dataset)  # type: ignore[arg-type]
        sampler: PoissonSampler
        if distributed:
            sampler = DistributedUniformWithReplacementSampler(
                total_size=size, sample_rate=sample_rate, generator=generator, steps=steps
            )
        else:
            sampler = UniformWithReplacementSampler(
                num_samples=size, sample_rate=sample_rate, generator=generator, steps=steps
            )
        if drop_last:
            logger.warning("Ignoring drop_last: Poisson sampling has no last, smaller batch.")
        super().__init__(
            dataset=dataset,
            batch_sampler=sampler,
            collate_fn=wrap_collate_with_empty(
                collate_fn=default_collate if collate_fn is None else collate_fn,
                batch_first=batch_first,
                rand_on_empty=rand_on_empty,
                dataset=dataset,
            ),
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
                draws.deliver(max(sizes.popleft(), int(self.rand_on_empty)))
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
    ) -> DPDataLoader:
        """Makes a loader like `data_loader`, but with Poisson sampling.

        The sample rate is 1 / `len(data_loader)`, so that the mean batch size and the number of
        steps stay. A sampler that is not uniform over the data set cannot stay; it is replaced
        with a warning, and the rate is then the batch size over the size of the data set.

        Args:
            data_loader: loader of batches over a map-style data set.
            distributed: see `DPDataLoader`.
            generator: source of randomness; by default that of `data_loader`.
            batch_first: see `DPDataLoader`.
            rand_on_empty: see `CollateFnWithEmpty`.
            sample_rate: the rate instead, a public number; an epoch has 1 / `sample_rate` steps.

        Raises:
            ValueError: if the data set is iterable or empty, if `data_loader` does not batch, or
                if it has a `SubsetRandomSampler` (samples left out would be drawn).
        """
        _check_map_style(data_loader.dataset)
        settings = loader_settings(data_loader)
        if generator is not None:
            settings["generator"] = generator
        steps = None
        if sample_rate is None and isinstance(data_loader, DPDataLoader):
            sample_rate, steps = data_loader.sample_rate, len(data_loader)
        elif sample_rate is None:
            sample_rate = matching_sample_rate(data_loader)
        return cls(
            dataset=data_loader.dataset,
            sample_rate=sample_rate,
            steps=steps,
            drop_last=data_loader.drop_last,
            distributed=distributed,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            **settings,
        )


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


def matching_sample_rate(data_loader: DataLoader[Any]) -> float:
    """The sample rate of Poisson sampling in place of `data_loader`'s sampling.

    See `DPDataLoader.from_data_loader`.
    """
    batch_sampler, size = data_loader.batch_sampler, len(data_loader.dataset)  # type: ignore
    if batch_sampler is None:
        raise ValueError("data_loader does not batch (batch_size=None); give it a batch_size")
    if len(data_loader) == 0:
        raise ValueError("data_loader has no batches: its data set is empty or its batch too large")
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    if isinstance(sampler, SubsetRandomSampler):
        raise ValueError(
            "data_loader has a SubsetRandomSampler. Poisson sampling would draw from the whole "
            "data set; give the loader torch.utils.data.Subset(dataset, indices) instead"
        )
    if _is_uniform(sampler, size):
        return 1 / len(data_loader)
    batch_size = getattr(batch_sampler, "batch_size", None)
    rate = 1 / len(data_loader) if batch_size is None else min(1.0, batch_size / size)
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
        return len(sampler) == size
    return isinstance(sampler, (DistributedSampler, PoissonSampler))


def switch_generator(
    *, data_loader: DataLoader[Any], generator: torch.Generator | None
) -> DataLoader[Any]:
    """Makes a loader that differs from `data_loader` only in its source of randomness.

    Args:
        data_loader: loader of batches with a random sampler. It keeps its own generator.
        generator: the new source of randomness.

    Raises:
        ValueError: if `data_loader` does not batch, or if its sampler has no generator to switch.
    """
    batch_sampler: Any = copy.copy(data_loader.batch_sampler)
    if isinstance(batch_sampler, BatchSampler):
        batch_sampler.sampler = _with_generator(batch_sampler.sampler, generator)
    elif isinstance(batch_sampler, PoissonSampler):
        batch_sampler = _with_generator(batch_sampler, generator)
    else:
        raise ValueError(
            f"cannot switch the generator of a loader with batch_sampler={batch_sampler!r}: it "
            "must be a BatchSampler or a Poisson sampler"
        )
    settings = {**loader_settings(data_loader), "generator": generator}
    return HostLoader(data_loader.dataset, batch_sampler=batch_sampler, **settings)


def _with_generator(sampler: Any, generator: torch.Generator | None) -> Any:
    if not hasattr(sampler, "generator"):
        raise ValueError(f"{type(sampler).__name__} has no generator to switch")
    switched = copy.copy(sampler)
    switched.generator = generator
    return switched


def sample_rate_of(data_loader: DataLoader[Any]) -> float:
    """Probability with which a sample is in a batch of ``data_loader``."""
    rate = getattr(data_loader, "sample_rate", None)
    return float(rate) if rate is not None else 1 / len(data_loader)


def expected_batch_size_on_rank(
    data_loader: DataLoader[Any], sample_rate: float, distributed: bool, of_all: float | None = None
) -> float:
    """Expected number of samples of a batch on one rank; `of_all` ranks together, if given."""
    size = len(data_loader.dataset) * sample_rate if of_all is None else of_all  # type: ignore[arg-type]
    return size / dist.get_world_size() if distributed else size
