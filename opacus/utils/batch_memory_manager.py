"""Logical batches in physical batches that fit into memory."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from opacus.data.collate import CollateFnWithEmpty, wrap_collate_with_empty
from opacus.data.fixed import PaddedCollate
from opacus.data.host_loader import HostLoader, loader_settings
from opacus.data.in_flight import InFlight
from opacus.data.sharding import ShardedBatchSampler, communication_device
from opacus.utils.uniform_sampler import POISSON, DistributedUniformWithReplacementSampler

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer

# Samplers whose batches differ in size between ranks.
_UNEVEN_SAMPLERS = (DistributedUniformWithReplacementSampler, ShardedBatchSampler)


class BatchSplittingSampler(Sampler[list[int]]):
    """Splits the batches of another batch sampler into physical batches.

    Each physical batch comes with a signal, "more of this logical batch follows" or "this was the
    last of it", which goes to `optimizer.signal_skip_step`. An empty logical batch is one empty
    physical batch, the last of it.

    Where ranks draw logical batches of different size, they agree on the number of physical
    batches, the largest of all ranks', and each splits its own into that many; some may be empty.
    So all ranks run the same number of forward and backward passes. The agreement is one
    all-reduce, when an iteration starts.

    Args:
        sampler: batch sampler of logical batches.
        max_batch_size: largest physical batch, positive.
        optimizer: the DP optimizer to signal to. Used directly, this sampler signals when it
            draws; the loader of `wrap_data_loader` signals when it delivers.

    Raises:
        ValueError: if `max_batch_size` is not a positive integer.
    """

    def __init__(
        self, *, sampler: Sampler[list[int]], max_batch_size: int, optimizer: DPOptimizer
    ) -> None:
        given: Any = max_batch_size
        if not (isinstance(given, Real) and given % 1 == 0 and given >= 1):
            raise ValueError(
                "max_batch_size (max_physical_batch_size of BatchMemoryManager) must be a positive "
                f"integer, got {max_batch_size!r}"
            )
        self.sampler = sampler
        self.max_batch_size = max_batch_size
        self.optimizer = optimizer
        self._signal: Callable[[bool], None] = self._signal_optimizer

    def __iter__(self) -> Iterator[list[int]]:
        return self._physical_batches(self._signal)

    def __len__(self) -> int:
        """Number of physical batches in an epoch; of Poisson batches, the mean, rounded up."""
        sampler: Any = self.sampler
        if isinstance(sampler, POISSON):
            replicas = getattr(sampler, "num_replicas", 1)
            return math.ceil(len(sampler) * self._mean_parts(sampler, replicas))
        replicas = 1
        if isinstance(sampler, ShardedBatchSampler):
            sampler, replicas = sampler.batch_sampler, sampler.num_replicas
        if not isinstance(sampler, BatchSampler):
            return len(sampler)
        rest = len(sampler.sampler) % sampler.batch_size  # type: ignore[arg-type]
        incomplete = 1 if rest and not sampler.drop_last else 0
        full = (len(sampler) - incomplete) * self._parts(math.ceil(sampler.batch_size / replicas))
        return full + incomplete * self._parts(math.ceil(rest / replicas))

    def _mean_parts(self, sampler: Any, replicas: int) -> float:
        """Mean over Poisson batches of the largest number of parts on `replicas` ranks."""
        # Here, because it is slow to import and seldom needed.
        from scipy.stats import binom  # type: ignore[import-untyped]

        mean = sampler.num_samples * sampler.sample_rate
        far = int(mean + 10 * math.sqrt(mean) + 50)
        steps = list(range(self.max_batch_size, far, self.max_batch_size))
        fits = binom.cdf(steps, sampler.num_samples, sampler.sample_rate)
        return 1.0 + float((1 - fits**replicas).sum())

    @contextlib.contextmanager
    def signalling_to(self, receiver: Callable[[bool], None]) -> Iterator[None]:
        """Iterations that start within the context signal to `receiver` instead."""
        self._signal = receiver
        try:
            yield
        finally:
            self._signal = self._signal_optimizer

    @property
    def agrees(self) -> bool:
        """Whether ranks have to agree on the number of physical batches."""
        if not isinstance(self.sampler, _UNEVEN_SAMPLERS) or self.sampler.num_replicas == 1:
            return False
        return dist.is_available() and dist.is_initialized()

    def _signal_optimizer(self, do_skip: bool) -> None:
        self.optimizer.signal_skip_step(do_skip=do_skip)

    def _physical_batches(self, signal: Callable[[bool], None]) -> Iterator[list[int]]:
        for batch, parts in self._agreed() if self.agrees else self._alone():
            for part in range(parts):
                signal(part < parts - 1)
                yield batch[_start(part, len(batch), parts) : _start(part + 1, len(batch), parts)]

    def _alone(self) -> Iterator[tuple[list[int], int]]:
        for batch in self.sampler:
            yield _as_list(batch), self._parts(len(batch))

    def _agreed(self) -> Iterator[tuple[list[int], int]]:
        # All batches are drawn at once: a collective in the middle of an epoch would depend on how
        # far workers prefetch, and would get into the way of the model's collectives.
        batches = [_as_list(batch) for batch in self.sampler]
        own = [self._parts(len(batch)) for batch in batches]
        parts = torch.tensor(own, dtype=torch.int64, device=communication_device())
        dist.all_reduce(parts, op=dist.ReduceOp.MAX)
        return zip(batches, parts.tolist(), strict=True)

    def _parts(self, batch_size: int) -> int:
        return max(1, math.ceil(batch_size / self.max_batch_size))


def _start(part: int, size: int, parts: int) -> int:
    """Where `part` starts if `size` samples are split into parts that differ by one at most."""
    return part * (size // parts) + min(part, size % parts)


def _as_list(batch: Any) -> list[int]:
    return batch.tolist() if hasattr(batch, "tolist") else list(batch)


class PhysicalBatchLoader(HostLoader):
    """Signals to the optimizer when it delivers a batch, however far workers have prefetched.

    Of the loaders of an optimizer one pass is live at a time. A pass that is left early (break, an
    exception, the start of another pass) takes with it what the optimizer has gathered of the
    unfinished logical batch.
    """

    batch_sampler: BatchSplittingSampler
    _latest: object | None = None  # stands for the latest pass; see the optimizer's physical_pass
    _in_flight: InFlight | None = None
    _number: int | None = None  # of the logical batch that is under way

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._abandon()
        signals: deque[bool] = deque()
        self._sizes = sizes = deque()
        with self.batch_sampler.signalling_to(signals.append):
            batches = super().__iter__()
        optimizer: Any = self.batch_sampler.optimizer
        self._latest = optimizer.physical_pass = object()
        return self._deliver(batches, signals, sizes, self._latest)

    def abandon(self) -> None:
        """Ends the pass under way, if there is one and it is over this loader."""
        if self._latest is not None and self._live is self._latest:
            self._abandon()

    def _abandon(self) -> None:
        """Ends the pass under way over any loader of the optimizer."""
        if self._live is not None:
            self._end()
            reset_accumulation(self.batch_sampler.optimizer)
            if self._draws is not None:
                self._draws.leave_pass(self._number)

    def _end(self) -> None:
        optimizer: Any = self.batch_sampler.optimizer
        optimizer.physical_pass = None
        if self._in_flight is not None:
            self._in_flight.end()

    @property
    def _live(self) -> object | None:
        return getattr(self.batch_sampler.optimizer, "physical_pass", None)

    @property
    def _draws(self) -> Any:
        """Of a Poisson sampler, if that draws the logical batches."""
        return getattr(self.batch_sampler.sampler, "draws", None)

    def _deliver(
        self, batches: Iterator[Any], signals: deque[bool], sizes: deque[int], own: object
    ) -> Iterator[Any]:
        optimizer: Any = self.batch_sampler.optimizer
        draws, self._number = self._draws, None
        made_up = getattr(self.collate_fn, "rand_on_empty", False)
        if self._in_flight is None:
            self._in_flight = InFlight(optimizer)
        in_flight = self._in_flight
        in_flight.begin()
        try:
            for batch in batches:
                self._require(own)
                in_flight.fetch()
                do_skip, size = signals.popleft(), sizes.popleft()
                optimizer.signal_skip_step(do_skip=do_skip)
                if draws is not None:
                    items = max(size, int(made_up))
                    self._number = draws.deliver(items, not do_skip, self._number, batch)
                in_flight.deliver(batch)
                yield batch
                self._require(own)
            in_flight.fetch()
            self._end()
        finally:
            if self._live is own:
                self._abandon()

    def _require(self, own: object) -> None:
        if self._live is not own:
            raise RuntimeError(
                "this pass over the data loader has ended: another one was started, or the "
                "BatchMemoryManager was left. Iterate over the loader once at a time"
            )


def reset_accumulation(optimizer: Any) -> None:
    """Makes `optimizer` forget an unfinished logical batch, if there is one and it knows how to.

    A finished one is left alone: its gradients may still be looked at.
    """
    signalled = getattr(optimizer, "_step_skip_queue", True)
    partial_sums = getattr(optimizer, "_is_last_step_skipped", True)
    lost = getattr(optimizer, "_part_is_lost", False)
    reset = getattr(optimizer, "reset_accumulation", None)
    if reset is not None and (signalled or partial_sums or lost):
        reset()


def wrap_data_loader(
    *, data_loader: DataLoader[Any], max_batch_size: int, optimizer: DPOptimizer
) -> PhysicalBatchLoader:
    """Makes a loader of physical batches from a loader of logical ones.

    The other settings of `data_loader` stay, but `in_order` is always true: a logical batch must
    be complete before the next one starts.

    Args:
        data_loader: loader of logical batches over a map-style data set. If it has been wrapped
            before, its logical batches are split anew.
        max_batch_size: largest physical batch.
        optimizer: the DP optimizer that is to accumulate.

    Raises:
        TypeError: if `optimizer` has no `signal_skip_step`.
        ValueError: if `data_loader` has no batch sampler or an iterable data set.
    """
    if not hasattr(optimizer, "signal_skip_step"):
        raise TypeError(
            f"optimizer must be a DPOptimizer as make_private returns it, got "
            f"{type(optimizer).__name__}"
        )
    if isinstance(data_loader.dataset, IterableDataset) or data_loader.batch_sampler is None:
        raise ValueError(
            "data_loader must draw batches of indices: its data set must not be iterable, and "
            "its batch_size must not be None"
        )
    logical: Any = data_loader.batch_sampler
    if isinstance(logical, BatchSplittingSampler):
        logical = logical.sampler
    sampler = BatchSplittingSampler(
        sampler=logical, max_batch_size=max_batch_size, optimizer=optimizer
    )
    settings = {**loader_settings(data_loader), "in_order": True}
    if isinstance(data_loader.collate_fn, PaddedCollate):
        settings["collate_fn"] = data_loader.collate_fn.for_items(max_batch_size)
    elif sampler.agrees and not isinstance(data_loader.collate_fn, CollateFnWithEmpty):
        settings["collate_fn"] = wrap_collate_with_empty(
            collate_fn=data_loader.collate_fn, dataset=data_loader.dataset
        )
    return PhysicalBatchLoader(data_loader.dataset, batch_sampler=sampler, **settings)


class BatchMemoryManager:
    """Context manager that keeps batches small enough for memory, whatever their logical size.

    The loader that it gives yields physical batches of at most `max_physical_batch_size` samples.
    The optimizer clips and sums the gradients of each; it adds noise and steps once a logical
    batch, after its last physical batch. The result is that of the undivided batch.

        with BatchMemoryManager(
            data_loader=data_loader, max_physical_batch_size=32, optimizer=optimizer
        ) as physical_loader:
            for x, y in physical_loader:
                criterion(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    Guarantee: a logical batch is one step of the mechanism, also if it is empty, provided that
    every physical batch, empty ones included, is followed by `optimizer.step()`. Leaving the loop
    or the context in the middle of a logical batch drops what was summed of it and the signals
    that belong to it (`optimizer.reset_accumulation()`). On several ranks, all do the same number
    of physical batches (see `BatchSplittingSampler`).

    Args:
        data_loader: loader of logical batches; it is not changed.
        max_physical_batch_size: largest number of samples in a physical batch.
        optimizer: the DP optimizer that is trained with.

    Raises:
        TypeError, ValueError: see `wrap_data_loader`; on entering.
    """

    def __init__(
        self,
        *,
        data_loader: DataLoader[Any],
        max_physical_batch_size: int,
        optimizer: DPOptimizer,
    ) -> None:
        self.data_loader = data_loader
        self.max_physical_batch_size = max_physical_batch_size
        self.optimizer = optimizer

    def __enter__(self) -> DataLoader[Any]:
        self._physical_loader = wrap_data_loader(
            data_loader=self.data_loader,
            max_batch_size=self.max_physical_batch_size,
            optimizer=self.optimizer,
        )
        return self._physical_loader

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._physical_loader.abandon()
        reset_accumulation(self.optimizer)
