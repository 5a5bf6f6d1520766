"""DPDataLoader, and what it makes of other loaders; empty batches have a file of their own."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from opacus import PrivacyEngine
from opacus.data.rates import warn_of_uneven_sampling
from opacus.data_loader import (
    DPDataLoader,
    dtype_safe,
    shape_safe,
    switch_generator,
)
from opacus.utils.uniform_sampler import UniformWithReplacementSampler


def test_shape_and_dtype_of_anything() -> None:
    assert shape_safe(torch.zeros(3)) == (3,) and shape_safe("text") == ()
    assert dtype_safe(torch.zeros(3)) == torch.float32 and dtype_safe("text") is str


@pytest.fixture
def data() -> TensorDataset:
    return TensorDataset(torch.arange(60))


def indices(loader: DataLoader) -> list:
    return [batch[0].tolist() for batch in loader]


def test_batches_are_poisson_batches(data: TensorDataset) -> None:
    loader = DPDataLoader(data, sample_rate=0.1, generator=torch.Generator().manual_seed(0))
    assert isinstance(loader.batch_sampler, UniformWithReplacementSampler)
    batches = indices(loader)
    assert len(batches) == len(loader) == 10
    assert len({len(batch) for batch in batches}) > 1


@pytest.mark.parametrize("make_seed", [0, 1])
def test_workers_do_not_change_the_batches(data: TensorDataset, make_seed: int) -> None:
    def load(workers: int) -> list:
        generator = torch.Generator().manual_seed(make_seed)
        loader = DPDataLoader(data, sample_rate=0.05, generator=generator, num_workers=workers)
        return indices(loader) + indices(loader)

    assert load(0) == load(2)


def keep_first(batch: list) -> Any:
    return default_collate(batch)


def quiet(worker: int) -> None:
    pass


SETTINGS: dict[str, Any] = {
    "num_workers": 2,
    "collate_fn": keep_first,
    "timeout": 30,
    "worker_init_fn": quiet,
    "multiprocessing_context": "spawn",
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory": True,
    "in_order": False,
}


def assert_same_settings(new: DataLoader, old: DataLoader) -> None:
    for name in set(SETTINGS) - {"collate_fn"}:
        assert getattr(new, name) == getattr(old, name), name
    assert getattr(new.collate_fn, "wrapped_collator_fn", new.collate_fn) is old.collate_fn


def test_settings_are_kept(data: TensorDataset) -> None:
    old = DataLoader(data, batch_size=4, shuffle=True, **SETTINGS)
    assert_same_settings(DPDataLoader.from_data_loader(old), old)
    assert_same_settings(switch_generator(data_loader=old, generator=torch.Generator()), old)
    assert_same_settings(DPDataLoader(data, sample_rate=0.1, **SETTINGS), old)


def test_rate_and_steps_follow_from_the_loader(data: TensorDataset) -> None:
    for batch_size, drop_last, steps in [
        (6, False, 10),
        (7, False, 9),
        (7, True, 8),
        (60, True, 1),
    ]:
        loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last)
        private = DPDataLoader.from_data_loader(loader)
        assert private.sample_rate == 1 / steps
        assert len(private) == steps


def test_generator_comes_from_the_loader_unless_given(data: TensorDataset) -> None:
    mine, other = torch.Generator(), torch.Generator()
    loader = DataLoader(data, batch_size=4, generator=mine)
    assert DPDataLoader.from_data_loader(loader).generator is mine
    private = DPDataLoader.from_data_loader(loader, generator=other)
    assert private.generator is other
    assert private.batch_sampler.generator is other


def test_making_a_private_loader_private_again(data: TensorDataset) -> None:
    once = DPDataLoader(data, sample_rate=0.3, steps=5, collate_fn=keep_first)
    twice = DPDataLoader.from_data_loader(once, rand_on_empty=True)
    assert (twice.sample_rate, len(twice)) == (0.3, 5)
    assert twice.collate_fn.wrapped_collator_fn is keep_first
    assert twice.collate_fn.rand_on_empty


def test_steps(data: TensorDataset) -> None:
    assert len(indices(DPDataLoader(data, sample_rate=0.5, steps=5))) == 5


def test_drop_last_is_ignored_with_a_warning(
    data: TensorDataset, caplog: pytest.LogCaptureFixture
) -> None:
    DPDataLoader.from_data_loader(DataLoader(data, batch_size=7, drop_last=True))
    assert "drop_last" in caplog.text


def test_arguments_that_say_nothing_are_fine(data: TensorDataset) -> None:
    DPDataLoader(data, sample_rate=0.1, batch_size=1, shuffle=False, sampler=None)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"batch_size": 4}),
        (ValueError, {"shuffle": True}),
        (ValueError, {"sampler": RandomSampler(range(60))}),
        (ValueError, {"batch_sampler": [[0]]}),
        (ValueError, {"sample_rate": 1.5}),
        (TypeError, {"num_worker": 2}),
    ],
)
def test_wrong_arguments(data: TensorDataset, error: type, arguments: dict) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        DPDataLoader(data, **{"sample_rate": 0.1, **arguments})


def test_iterable_data_is_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(4))

    with pytest.raises(ValueError, match="IterableDataset"):
        DPDataLoader.from_data_loader(DataLoader(Stream(), batch_size=2))
    with pytest.raises(ValueError, match="IterableDataset"):
        DPDataLoader(Stream(), sample_rate=0.1)


def test_loaders_without_batches_are_refused(data: TensorDataset) -> None:
    with pytest.raises(ValueError, match="batch_size=None"):
        DPDataLoader.from_data_loader(DataLoader(data, batch_size=None))
    with pytest.raises(ValueError, match="no batches"):
        DPDataLoader.from_data_loader(DataLoader(data, batch_size=61, drop_last=True))


# Samplers that Poisson sampling replaces


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.ones(60), 12),
        RandomSampler(range(60), num_samples=12),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_other_samplers_are_replaced_at_the_rate_of_the_batch_size(
    data: TensorDataset, caplog: pytest.LogCaptureFixture, sampler: Any
) -> None:
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=3, sampler=sampler))
    assert loader.sample_rate == 3 / 60
    assert len(loader) == 20
    assert type(sampler).__name__ in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 4, "shuffle": True},
        {"batch_sampler": BatchSampler(RandomSampler(range(60)), 4, drop_last=False)},
    ],
)
def test_uniform_samplers_are_replaced_silently(
    data: TensorDataset, caplog: pytest.LogCaptureFixture, arguments: dict
) -> None:
    assert DPDataLoader.from_data_loader(DataLoader(data, **arguments)).sample_rate == 1 / 15
    assert caplog.records == []


def test_subset_sampler_is_refused(data: TensorDataset) -> None:
    """Samples that it leaves out, for validation say, would be trained on."""
    chosen = list(range(10))
    loader = DataLoader(data, batch_size=5, sampler=SubsetRandomSampler(chosen))
    with pytest.raises(ValueError, match="Subset"):
        DPDataLoader.from_data_loader(loader)
    loader = DPDataLoader.from_data_loader(DataLoader(Subset(data, chosen), batch_size=5))
    assert set(chain(*indices(loader))) <= set(chosen)


# switch_generator


def test_switched_loader_draws_from_the_new_generator(data: TensorDataset) -> None:
    def load(seed: int, loader: DataLoader) -> list:
        generator = torch.Generator().manual_seed(seed)
        return indices(switch_generator(data_loader=loader, generator=generator))

    for loader in (DataLoader(data, batch_size=7, shuffle=True, drop_last=True), poisson(data)):
        assert load(0, loader) == load(0, loader) != load(1, loader)
        assert len(load(0, loader)) == len(loader)


def poisson(data: Dataset) -> DPDataLoader:
    return DPDataLoader(data, sample_rate=0.1, generator=torch.Generator())


def test_switching_leaves_the_original_alone(data: TensorDataset) -> None:
    loader = poisson(data)
    before = loader.batch_sampler.generator
    switched = switch_generator(data_loader=loader, generator=torch.Generator())
    assert loader.batch_sampler.generator is before
    assert switched.batch_sampler.generator is switched.generator is not before


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 4}, {"batch_size": None}, {"batch_sampler": [[0]]}]
)
def test_nothing_to_switch(data: TensorDataset, arguments: dict) -> None:
    with pytest.raises(ValueError):
        switch_generator(data_loader=DataLoader(data, **arguments), generator=torch.Generator())


def test_importing_sets_up_no_logging() -> None:
    assert logging.getLogger("opacus.data_loader").handlers == []


@pytest.mark.parametrize("poisson", [True, False])
def test_a_data_set_without_items(poisson: bool) -> None:
    model, loader = nn.Linear(2, 1), DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=4)
    given: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": loader,
        "max_grad_norm": 1.0,
        "poisson_sampling": poisson,
    }
    budget = {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1}
    with pytest.raises(ValueError, match="has no batches"):
        PrivacyEngine().make_private(**given, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="has no batches"):
        PrivacyEngine().make_private_with_epsilon(**given, **budget)


def test_draws_with_replacement_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """As many as there are items; one may be in a batch twice."""
    data = TensorDataset(torch.zeros(9, 2))
    for replacement, told in ((True, "more often than others"), (False, "shuffled pass")):
        caplog.clear()
        warn_of_uneven_sampling(
            DataLoader(data, batch_size=3, sampler=RandomSampler(data, replacement=replacement))
        )
        assert told in caplog.text


class Rated(DataLoader[Any]):
    """A loader of one's own that knows its rate."""

    sample_rate = 0.1


class Sound(DataLoader[Any]):
    """Whose rate is that of its samples in time."""

    sample_rate = 16_000


@pytest.mark.parametrize("poisson", [True, False])
def test_a_rate_in_hertz_is_not_the_one_of_sampling(poisson: bool) -> None:
    model, engine = nn.Linear(2, 1), PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=Sound(TensorDataset(torch.zeros(40, 2)), batch_size=8), noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=poisson,
    )  # fmt: skip
    assert len(loader) == 5 and optimizer.expected_batch_size == 8


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("poisson", [True, False])
def test_a_target_epsilon_holds_for_the_steps_of_a_private_loader(poisson: bool, own: bool) -> None:
    """Its epoch has as many steps as it says, not 1 / rate."""
    model, engine, data = nn.Linear(2, 1), PrivacyEngine(), TensorDataset(torch.zeros(40, 2))
    rated = Rated(data, batch_size=1) if own else DPDataLoader(data, sample_rate=0.1, steps=40)
    loader: DataLoader[Any] = rated
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        target_epsilon=1.0, target_delta=1e-5, epochs=0.5, max_grad_norm=1.0,
        poisson_sampling=poisson,
    )  # fmt: skip
    assert len(loader) == 40
    engine.accountant.history = [(optimizer.noise_multiplier, 0.1, 20)]
    assert 0.9 < engine.get_epsilon(1e-5) <= 1.0


def test_a_loader_of_ones_own_is_kept() -> None:
    class Own:
        dataset = TensorDataset(torch.zeros(9, 2))

        def __len__(self) -> int:
            return 3

    warn_of_uneven_sampling(Own())  # type: ignore[arg-type]
