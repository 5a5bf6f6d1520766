"""The distribution of Poisson batches, on one process; ranks are simulated."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from opacus.utils import uniform_sampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    poisson_draw,
)

# Two-sided: a statistic that is too small (draws too regular) is as wrong as one too large.
TAIL = 1e-4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_chi2(statistic: float, degrees: int, tail: float = TAIL) -> None:
    low, high = chi2.ppf([tail, 1 - tail], degrees)
    assert low < statistic < high, f"{statistic:.1f} not in ({low:.1f}, {high:.1f})"


def standardised(batches: list, num_samples: int, rate: float) -> np.ndarray:
    """Inclusion of each sample in each batch, mean 0 and variance 1; `[steps, num_samples]`."""
    included = np.zeros((len(batches), num_samples))
    for row, batch in zip(included, batches, strict=True):
        row[list(batch)] = 1
        assert row.sum() == len(batch), "a sample is in a batch twice"
    return (included - rate) / math.sqrt(rate * (1 - rate))


def assert_independent_coins(coins: np.ndarray) -> None:
    steps, num_samples = coins.shape
    # Each sample's frequency.
    assert_chi2((coins.sum(0) ** 2 / steps).sum(), num_samples)
    # The variance of the batch size.
    assert_chi2((coins.sum(1) ** 2 / num_samples).sum(), steps)
    # Pairs of samples within a batch.
    products = coins.T @ coins / math.sqrt(steps)
    pairs = products[np.triu_indices(num_samples, 1)]
    assert_chi2((pairs**2).sum(), len(pairs))
    # The same sample in successive batches.
    successive = (coins[1:] * coins[:-1]).sum(0) / math.sqrt(steps - 1)
    assert_chi2((successive**2).sum(), num_samples)


# One process


@pytest.mark.parametrize("rate", [0.03, 0.2, 0.5])
def test_coins_are_independent_and_fair(rate: float) -> None:
    sampler = UniformWithReplacementSampler(
        num_samples=40, sample_rate=rate, generator=seeded(), steps=4000
    )
    assert_independent_coins(standardised(list(sampler), 40, rate))


@pytest.mark.parametrize("rate", [0.01, 0.2])
def test_draw_by_gaps_has_the_same_distribution(rate: float) -> None:
    generator = seeded(1)
    batches = [uniform_sampler._draw_by_gaps(40, rate, generator).tolist() for _ in range(4000)]
    assert all(batch == sorted(batch) for batch in batches)
    assert_independent_coins(standardised(batches, 40, rate))


def test_draw_by_gaps_goes_on_if_it_drew_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []

    def few(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        draws.append(count)
        return torch.rand(3, dtype=dtype, generator=generator)

    monkeypatch.setattr(uniform_sampler, "_uniforms", few)
    generator = seeded(2)
    batches = [uniform_sampler._draw_by_gaps(40, 0.3, generator).tolist() for _ in range(3000)]
    assert len(draws) > 3 * len(batches)
    assert_independent_coins(standardised(batches, 40, 0.3))


@pytest.mark.parametrize(("num_samples", "rate"), [(50_000_000, 2e-7), (5_000_000, 1e-3)])
def test_large_population_is_not_visited(
    monkeypatch: pytest.MonkeyPatch, num_samples: int, rate: float
) -> None:
    uniforms, drawn = uniform_sampler._uniforms, []

    def counting(count: int, *args: object) -> torch.Tensor:
        drawn.append(count)
        return uniforms(count, *args)

    monkeypatch.setattr(uniform_sampler, "_uniforms", counting)
    steps, generator = 40, seeded(3)
    batches = [poisson_draw(num_samples, rate, generator) for _ in range(steps)]
    assert max(drawn) < 2 * num_samples * rate + 100
    sizes = np.array([len(batch) for batch in batches])
    assert_chi2(((sizes - num_samples * rate) ** 2 / (num_samples * rate)).sum(), steps)
    # All over the population alike.
    bins = np.histogram(torch.cat(batches).numpy(), bins=20, range=(0, num_samples))[0]
    mean = sizes.sum() / 20
    assert_chi2(((bins - mean) ** 2 / mean).sum(), 19)


@pytest.mark.parametrize("rate", [0.2, 2.0**-13])
def test_coins_of_the_operating_system(rate: float) -> None:
    size, steps = int(8 / rate), 3000
    generator = uniform_sampler.SystemGenerator()
    batches = [poisson_draw(size, rate, generator) for _ in range(steps)]
    unseeded = 1e-8  # new luck in each run
    assert_chi2(sum((len(b) - 8) ** 2 for b in batches) / (8 * (1 - rate)), steps, unseeded)
    bins = np.histogram(torch.cat(batches).numpy(), bins=20, range=(0, size))[0]
    assert_chi2(((bins - bins.mean()) ** 2 / bins.mean()).sum() / (1 - rate), 19, unseeded)
    same_seed = uniform_sampler.SystemGenerator().manual_seed(generator.initial_seed())
    assert not torch.equal(
        same_seed.uniforms(9, torch.float32), generator.uniforms(9, torch.float32)
    )


def test_probability_is_never_above_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 0.3
    below = math.floor(rate * 2**24)
    grid = torch.tensor([below - 1, below, below + 1], dtype=torch.float32) / 2**24
    monkeypatch.setattr(uniform_sampler, "_uniforms", lambda *args: grid)
    assert (grid[1] < rate).item()  # so that a plain comparison would include one value too many
    assert poisson_draw(3, rate).tolist() == [0]


def test_low_rate_is_exact_beyond_the_grid_of_the_uniforms() -> None:
    """With fp32 uniforms the probability would be 2^-24, four times the rate."""
    rate, num_samples, generator = 2.0**-26, 2**26, seeded(4)
    sizes = [len(poisson_draw(num_samples, rate, generator)) for _ in range(400)]
    assert_chi2(sum((size - 1) ** 2 for size in sizes), 400)


def test_rate_one_draws_everybody() -> None:
    sampler = UniformWithReplacementSampler(num_samples=5, sample_rate=1.0)
    assert list(sampler) == [[0, 1, 2, 3, 4]]


def test_a_seed_gives_the_batches_that_opacus_gives() -> None:
    sampler = UniformWithReplacementSampler(num_samples=60, sample_rate=0.1, generator=seeded(5))
    reference = seeded(5)
    for batch in sampler:
        mask = torch.rand(60, generator=reference) < 0.1
        assert batch == mask.nonzero().reshape(-1).tolist()


def test_empty_batches_are_yielded() -> None:
    sampler = UniformWithReplacementSampler(num_samples=2, sample_rate=0.01, generator=seeded())
    batches = list(sampler)
    assert len(batches) == len(sampler) == 100
    assert batches.count([]) > 50


def test_reproducible_but_different_each_epoch() -> None:
    def epochs(generator: torch.Generator | None) -> list:
        sampler = UniformWithReplacementSampler(
            num_samples=50, sample_rate=0.2, generator=generator
        )
        return [list(sampler), list(sampler)]

    assert epochs(seeded(6)) == epochs(seeded(6)) != epochs(seeded(7))
    first, second = epochs(seeded(6))
    assert first != second
    torch.manual_seed(8)
    from_global = epochs(None)
    torch.manual_seed(8)
    assert from_global == epochs(None)


def test_steps_is_the_inverse_of_the_rate() -> None:
    for steps in [*range(1, 2000), 10**6, 10**6 + 1]:
        assert len(UniformWithReplacementSampler(num_samples=5, sample_rate=1 / steps)) == steps


@pytest.mark.parametrize(
    ("rate", "steps"), [(10 / 930, 93), (0.3, 3), (0.35, 2), (0.51, 1), (1.0, 1), (1 / 92.5, 92)]
)
def test_number_of_steps(rate: float, steps: int) -> None:
    assert len(UniformWithReplacementSampler(num_samples=5, sample_rate=rate)) == steps


def test_given_steps_win() -> None:
    sampler = UniformWithReplacementSampler(num_samples=5, sample_rate=0.5, steps=7)
    assert len(sampler) == len(list(sampler)) == 7


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_samples": 0, "sample_rate": 0.1}, "num_samples"),
        ({"num_samples": 5, "sample_rate": 0.0}, "sample_rate"),
        ({"num_samples": 5, "sample_rate": 1.1}, "sample_rate"),
        ({"num_samples": 5, "sample_rate": math.nan}, "sample_rate"),
        ({"num_samples": 5, "sample_rate": 0.1, "steps": -1}, "steps"),
    ],
)
def test_bad_arguments(arguments: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        UniformWithReplacementSampler(**arguments)


# Several ranks


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch):
    """Makes the samplers of all ranks, from generators with equal seeds unless told otherwise."""

    def make(world_size: int, *, seed: int = 0, **arguments) -> list:
        samplers = []
        for rank in range(world_size):
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            arguments["generator"] = seeded(seed)
            samplers.append(DistributedUniformWithReplacementSampler(**arguments))
        return samplers

    return make


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("total", "world_size"), [(12, 3), (13, 3), (14, 3), (2, 3), (7, 1)])
def test_each_sample_belongs_to_exactly_one_rank(on_ranks, shuffle, total, world_size) -> None:
    samplers = on_ranks(world_size, total_size=total, sample_rate=1.0, shuffle=shuffle)
    shares = [[i.item() for i in next(iter(sampler))] for sampler in samplers]
    assert sorted(chain(*shares)) == list(range(total))
    assert [len(share) for share in shares] == [sampler.num_samples for sampler in samplers]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_set_epoch_deals_anew(on_ranks) -> None:
    (sampler, _) = on_ranks(2, total_size=40, sample_rate=1.0)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first
    sampler.set_epoch(1)
    assert set(next(iter(sampler))) != set(first)
    (other, _) = on_ranks(2, total_size=40, sample_rate=1.0, shuffle_seed=1)
    assert next(iter(other)) == next(iter(sampler))  # as in Opacus, the seeds add up


def test_every_rank_yields_len_batches_empty_ones_included(on_ranks) -> None:
    samplers = on_ranks(3, total_size=20, sample_rate=0.02)
    batches = [list(sampler) for sampler in samplers]
    assert [len(b) for b in batches] == [len(s) for s in samplers] == [50] * 3
    assert all(any(len(batch) == 0 for batch in b) for b in batches)


@pytest.mark.parametrize("world_size", [2, 3])
def test_union_of_ranks_is_a_poisson_batch(on_ranks, world_size: int) -> None:
    """In particular across ranks: equal seeds must not give equal coins."""
    samplers = on_ranks(world_size, total_size=40, sample_rate=0.2, steps=4000)
    union = [list(chain(*parts)) for parts in zip(*samplers, strict=True)]
    assert_independent_coins(standardised(union, 40, 0.2))


def test_streams_of_ranks_are_uncorrelated_position_by_position(on_ranks) -> None:
    rate, steps, share = 0.2, 4000, 20
    samplers = on_ranks(2, total_size=2 * share, sample_rate=rate, steps=steps, shuffle=False)
    coins = [
        standardised([[i // 2 for i in batch] for batch in sampler], share, rate)
        for sampler in samplers
    ]
    correlation = (coins[0] * coins[1]).sum(0) / math.sqrt(steps)
    assert_chi2((correlation**2).sum(), share)


def test_distributed_draws_are_reproducible(on_ranks) -> None:
    def draw(seed: int, epoch: int) -> list:
        (sampler, _) = on_ranks(2, seed=seed, total_size=50, sample_rate=0.2, shuffle=False)
        sampler.set_epoch(epoch)
        return [list(sampler), list(sampler)]

    assert draw(0, 0) == draw(0, 0)
    assert draw(0, 0) != draw(1, 0)
    assert draw(0, 0) != draw(0, 1)
    first, second = draw(0, 0)
    assert first != second


def test_ranks_may_draw_from_the_operating_system(on_ranks) -> None:
    (sampler, _) = on_ranks(2, total_size=50, sample_rate=0.2)
    sampler.generator = uniform_sampler.SystemGenerator()
    assert list(sampler) != list(sampler)


def test_bad_arguments_of_the_distributed_sampler(on_ranks) -> None:
    with pytest.raises(ValueError, match="total_size"):
        on_ranks(2, total_size=0, sample_rate=0.1)
    with pytest.raises(ValueError, match="sample_rate"):
        on_ranks(2, total_size=5, sample_rate=2.0)
