"""Loaders that draw where their generators are, and the loaders made from others."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from opacus.core.privacy.noise import device_of
from opacus.utils.uniform_sampler import POISSON

# Arguments of a loader other than its data set and its sampling.
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


def loader_settings(data_loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments that rebuild `data_loader`, but for its data set and its sampling."""
    return {name: getattr(data_loader, name) for name in _SETTINGS}


class HostLoader(DataLoader[Any]):
    """A `DataLoader` that draws where its generators are, whatever the default device is.

    Torch's own draws on the default device: after `torch.set_default_device("cuda")` it fails with
    a generator on the CPU, and shuffles with none on the GPU only.
    """

    # Sizes of the batches that the latest pass has drawn and not yet delivered.
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
    elif isinstance(batch_sampler, POISSON):
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
