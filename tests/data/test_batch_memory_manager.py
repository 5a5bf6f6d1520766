"""Physical batches add up to the logical ones, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import (
    BatchMemoryManager,
    BatchSplittingSampler,
    wrap_data_loader,
)
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

SIZE = 40
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Accumulator:
    """Stands for a DP optimizer: gathers samples, and takes a step with what it has gathered."""

    def __init__(self) -> None:
        self._step_skip_queue: list[bool] = []
        self._is_last_step_skipped = False
        self.gathered: list[int] = []
        self.steps: list[list[int]] = []
        self.resets = 0

    @property
    def signals(self) -> list[bool]:
        return self._step_skip_queue

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self._step_skip_queue.append(do_skip)

    def step(self, batch: list) -> None:
        self.gathered += batch[0].tolist()
        self._is_last_step_skipped = bool(self.signals and self.signals.pop(0))
        if not self._is_last_step_skipped:
            self.steps.append(self.gathered)
            self.gathered = []

    def reset_accumulation(self) -> None:
        self._step_skip_queue, self._is_last_step_skipped, self.gathered = [], False, []
        self.resets += 1


def data() -> Dataset:
    return TensorDataset(torch.arange(SIZE))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def manage(loader: DataLoader, optimizer: Any, largest: int = 5) -> BatchMemoryManager:
    return BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=largest, optimizer=optimizer
    )


def batch_sampler() -> BatchSampler:
    return BatchSampler(SequentialSampler(range(SIZE)), 11, drop_last=False)


LOADERS = {
    "batch_size": {"batch_size": 12},
    "drop_last": {"batch_size": 12, "drop_last": True},
    "shuffle": {"batch_size": 12, "shuffle": True},
    "sampler": {"batch_size": 12, "sampler": range(SIZE - 1, -1, -1)},
    "batch_sampler": {"batch_sampler": batch_sampler()},
    "list of batches": {"batch_sampler": [[1, 2, 3], list(range(16)), [5]]},
    "smaller than the limit": {"batch_size": 3},
}


def make_loader(kind: str, workers: int) -> DataLoader:
    if kind == "Poisson":
        return DPDataLoader(data(), sample_rate=0.2, generator=seeded(), num_workers=workers)
    if kind == "Poisson, often empty":
        return DPDataLoader(data(), sample_rate=0.02, generator=seeded(), num_workers=workers)
    return DataLoader(data(), generator=seeded(), num_workers=workers, **LOADERS[kind])


@WORKERS
@pytest.mark.parametrize("kind", [*LOADERS, "Poisson", "Poisson, often empty"])
def test_each_step_is_a_logical_batch(kind: str, workers: int) -> None:
    expected = [batch[0].tolist() for batch in make_loader(kind, workers)]
    optimizer, sizes = Accumulator(), []
    with manage(make_loader(kind, workers), optimizer) as loader:
        for batch in loader:
            sizes.append(len(batch[0]))
            optimizer.step(batch)
    assert optimizer.steps == expected
    assert max(sizes) <= 5
    if kind == "Poisson, often empty":
        assert [] in expected and sizes.count(0) == expected.count([])
    assert (len(sizes) > len(expected)) == any(len(batch) > 5 for batch in expected)


def test_parts_of_a_batch_differ_by_one_at_most() -> None:
    loader = DataLoader(data(), batch_sampler=[list(range(17))])
    with manage(loader, Accumulator(), largest=6) as physical:
        assert sorted(len(batch[0]) for batch in physical) == [5, 6, 6]


# Signals


def test_signal_comes_with_the_batch_not_with_the_prefetch() -> None:
    optimizer = Accumulator()
    with manage(DataLoader(data(), batch_size=10, num_workers=2), optimizer) as loader:
        batches = iter(loader)
        assert optimizer.signals == []
        for expected in ([True], [True, False], [True, False, True]):
            next(batches)
            assert optimizer.signals == expected


def test_a_consumer_that_looks_one_batch_ahead_gets_it_right() -> None:
    """As the loaders of accelerate and Lightning do."""

    def ahead(batches: Any) -> Iterator[Any]:
        batches = iter(batches)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current

    optimizer = Accumulator()
    with manage(DataLoader(data(), batch_size=20), optimizer) as loader:
        for batch in ahead(loader):
            optimizer.step(batch)
    assert [len(step) for step in optimizer.steps] == [20, 20]


def test_sampler_used_by_another_loader_signals_when_it_draws() -> None:
    optimizer = Accumulator()
    sampler = BatchSplittingSampler(sampler=batch_sampler(), max_batch_size=5, optimizer=optimizer)
    batches = iter(sampler)
    assert [len(next(batches)) for _ in range(4)] == [4, 4, 3, 4]
    assert optimizer.signals == [True, True, False, True]

    optimizer = Accumulator()
    wrapped = wrap_data_loader(
        data_loader=DataLoader(data(), batch_size=20), max_batch_size=5, optimizer=optimizer
    )
    for batch in DataLoader(data(), batch_sampler=wrapped.batch_sampler):
        optimizer.step(batch)
    assert [len(step) for step in optimizer.steps] == [20, 20]


# Leaving early


class Boom(Exception):
    pass


def leave_by_break(loader: DataLoader, optimizer: Accumulator) -> None:
    with manage(loader, optimizer) as physical:
        for number, batch in enumerate(physical):
            optimizer.step(batch)
            if number == 1:
                break


def leave_by_exception(loader: DataLoader, optimizer: Accumulator) -> None:
    with pytest.raises(Boom), manage(loader, optimizer) as physical:
        for number, batch in enumerate(physical):
            if number == 2:
                raise Boom
            optimizer.step(batch)


def leave_with_the_iterator_alive(loader: DataLoader, optimizer: Accumulator) -> Any:
    with manage(loader, optimizer) as physical:
        batches = iter(physical)
        optimizer.step(next(batches))
        next(batches)
    return batches


@WORKERS
@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_exception, leave_with_the_iterator_alive]
)
def test_nothing_of_an_unfinished_batch_is_left(leave: Any, workers: int) -> None:
    optimizer = Accumulator()
    kept = leave(DataLoader(data(), batch_size=20, num_workers=workers), optimizer)
    assert (optimizer.signals, optimizer.gathered, optimizer.steps) == ([], [], [])
    optimizer.step([torch.arange(3)])
    assert optimizer.steps == [[0, 1, 2]]
    del kept


def test_break_and_start_anew_in_the_same_context() -> None:
    optimizer = Accumulator()
    with manage(DataLoader(data(), batch_size=20), optimizer) as loader:
        for batch in loader:
            optimizer.step(batch)
            break
        for batch in loader:
            optimizer.step(batch)
    assert [len(step) for step in optimizer.steps] == [20, 20]


def test_peeking_leaves_no_signal() -> None:
    optimizer = Accumulator()
    with manage(DataLoader(data(), batch_size=20), optimizer) as loader:
        next(iter(loader))
        assert optimizer.signals == []


def test_a_pass_that_another_one_has_replaced_raises() -> None:
    optimizer = Accumulator()
    with manage(DataLoader(data(), batch_size=20), optimizer) as loader:
        first = iter(loader)
        optimizer.step(next(first))
        second = iter(loader)
        with pytest.raises(RuntimeError, match="once at a time"):
            next(first)
        for batch in second:
            optimizer.step(batch)
    assert [len(step) for step in optimizer.steps] == [20, 20]


def test_an_iterator_that_dies_late_resets_nothing() -> None:
    optimizer = Accumulator()
    batches = leave_with_the_iterator_alive(DataLoader(data(), batch_size=20), optimizer)
    before = optimizer.resets
    del batches
    assert optimizer.resets == before


def test_a_finished_batch_is_left_alone() -> None:
    """Its gradients may be wanted after the loop, after a break, and after the context."""
    optimizer = Accumulator()
    with manage(DataLoader(data(), batch_size=20), optimizer) as loader:
        for _ in range(2):
            for batch in loader:
                optimizer.step(batch)
        for number, batch in enumerate(loader):
            optimizer.step(batch)
            if number == 3:
                break
    assert [len(step) for step in optimizer.steps] == [20] * 5
    assert optimizer.resets == 0


def test_optimizer_without_reset_is_fine() -> None:
    class Plain:
        def signal_skip_step(self, do_skip: bool = True) -> None:
            pass

    with manage(DataLoader(data(), batch_size=20), Plain()) as loader:
        next(iter(loader))


# The loader


def test_settings_are_kept() -> None:
    def init(worker: int) -> None:
        pass

    settings: dict[str, Any] = {
        "num_workers": 2,
        "collate_fn": default_collate,
        "timeout": 30,
        "worker_init_fn": init,
        "multiprocessing_context": "fork",
        "generator": seeded(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory": True,
    }
    loader = DataLoader(data(), batch_size=20, in_order=False, **settings)
    with manage(loader, Accumulator()) as physical:
        for name, value in settings.items():
            assert getattr(physical, name) == getattr(loader, name), name
            assert value is not None
        assert physical.dataset is loader.dataset
        assert physical.in_order  # or parts of different logical batches would mix


def test_persistent_workers_over_several_passes() -> None:
    optimizer = Accumulator()
    loader = DataLoader(data(), batch_size=20, num_workers=2, persistent_workers=True)
    with manage(loader, optimizer) as physical:
        for leave_early in (True, False, False):
            for batch in physical:
                optimizer.step(batch)
                if leave_early:
                    break
    assert [len(step) for step in optimizer.steps] == [20] * 4


def test_wrapping_a_wrapped_loader_splits_the_logical_batches() -> None:
    optimizer = Accumulator()
    loader = DataLoader(data(), batch_size=20)
    with manage(loader, optimizer, largest=5) as loader, manage(loader, optimizer, 7) as physical:
        sizes = [len(batch[0]) for batch in physical]
        assert sizes == [7, 7, 6, 7, 7, 6]
        assert optimizer.signals == [True, True, False] * 2


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("largest", [1, 5, 12, 100])
def test_length_of_fixed_batches(kind: str, largest: int) -> None:
    with manage(make_loader(kind, 0), Accumulator(), largest) as physical:
        if kind == "list of batches":
            assert len(physical) == 3
        else:
            assert len(physical) == len(list(physical))


@pytest.mark.parametrize(("rate", "largest"), [(0.02, 1), (0.2, 1), (0.2, 5), (0.5, 8)])
def test_length_of_poisson_batches_is_the_mean(rate: float, largest: int) -> None:
    steps = 1000
    sampler = UniformWithReplacementSampler(
        num_samples=SIZE, sample_rate=rate, generator=seeded(), steps=steps
    )
    split = BatchSplittingSampler(sampler=sampler, max_batch_size=largest, optimizer=Accumulator())
    # The number of parts of a batch has a standard deviation below that of its size.
    deviation = (SIZE * rate * (1 - rate) / largest**2 + 0.25) ** 0.5 * steps**0.5
    assert abs(len(list(split)) - len(split)) < 4.5 * deviation


# Refusals


def test_optimizer_must_be_a_private_one() -> None:
    manager = manage(DataLoader(data(), batch_size=20), torch.optim.SGD([torch.zeros(1)]))
    with pytest.raises(TypeError, match="SGD"):
        manager.__enter__()


@pytest.mark.parametrize("largest", [0, -1, 2.5, "16", None])
def test_limit_must_be_a_positive_integer(largest: Any) -> None:
    with pytest.raises(ValueError, match="must be a positive integer"):
        manage(DataLoader(data(), batch_size=20), Accumulator(), largest).__enter__()


def test_loaders_that_cannot_be_split_are_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    for loader in (DataLoader(Stream(), batch_size=2), DataLoader(data(), batch_size=None)):
        with pytest.raises(ValueError, match="batches of indices"):
            manage(loader, Accumulator()).__enter__()
