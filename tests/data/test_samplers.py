"""The distribution of Poisson batches, on one process; ranks are simulated."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from opacus.core.privacy.key import RunKey
from opacus.utils import uniform_sampler
from opacus.utils.uniform_sampler import (
    Coins,
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    poisson_draw,
)

# Two-sided: a statistic that is too small (draws too regular) is as wrong as one too large.
TAIL = 1e-4


# Functions of their arguments, which many samplers of equal seeds ask for again.
words_between = functools.cache(uniform_sampler.words_between)


@pytest.fixture(autouse=True)
def _each_word_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniform_sampler, "words_between", words_between)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def coins(number: int, seed: int = 0) -> Coins:
    return Coins.of(RunKey(seeded(seed)), number)


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
    batches = [uniform_sampler._draw_by_gaps(40, rate, coins(k)).tolist() for k in range(4000)]
    assert all(batch == sorted(batch) for batch in batches)
    assert_independent_coins(standardised(batches, 40, rate))


@pytest.mark.slow
def test_draw_by_gaps_goes_on_if_it_drew_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, uniforms = [], Coins.uniforms

    def few(self: Coins, start: int, end: int) -> torch.Tensor:
        draws.append(end - start)
        return uniforms(self, start, end)[:3]

    monkeypatch.setattr(Coins, "uniforms", few)
    batches = [uniform_sampler._draw_by_gaps(40, 0.3, coins(k)).tolist() for k in range(1000)]
    assert len(draws) > 3 * len(batches)
    assert_independent_coins(standardised(batches, 40, 0.3))


@pytest.mark.parametrize(("num_samples", "rate"), [(50_000_000, 2e-7), (5_000_000, 1e-3)])
def test_large_population_is_not_visited(
    monkeypatch: pytest.MonkeyPatch, num_samples: int, rate: float
) -> None:
    uniforms, drawn = Coins.uniforms, []

    def counting(self: Coins, start: int, end: int) -> torch.Tensor:
        drawn.append(end - start)
        return uniforms(self, start, end)

    monkeypatch.setattr(Coins, "uniforms", counting)
    steps = 40
    batches = [poisson_draw(num_samples, rate, coins(k)) for k in range(steps)]
    assert max(drawn) < 2 * num_samples * rate + 100
    sizes = np.array([len(batch) for batch in batches])
    assert_chi2(((sizes - num_samples * rate) ** 2 / (num_samples * rate)).sum(), steps)
    # All over the population alike.
    bins = np.histogram(torch.cat(batches).numpy(), bins=20, range=(0, num_samples))[0]
    mean = sizes.sum() / 20
    assert_chi2(((bins - mean) ** 2 / mean).sum(), 19)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.2, 2.0**-13])
def test_coins_of_the_operating_system(rate: float) -> None:
    size, steps = int(8 / rate), 1000
    generator = uniform_sampler.SystemGenerator()
    batches = [poisson_draw(size, rate, generator) for _ in range(steps)]
    unseeded = 1e-8  # new luck in each run
    assert_chi2(sum((len(b) - 8) ** 2 for b in batches) / (8 * (1 - rate)), steps, unseeded)
    off = sum(map(len, batches)) - 8 * steps  # finds a rate that is off by a twelfth
    assert off**2 / (8 * steps * (1 - rate)) < chi2.ppf(1 - unseeded, 1)
    bins = np.histogram(torch.cat(batches).numpy(), bins=20, range=(0, size))[0]
    assert_chi2(((bins - bins.mean()) ** 2 / bins.mean()).sum() / (1 - rate), 19, unseeded)
    same_seed = uniform_sampler.SystemGenerator().manual_seed(generator.initial_seed())
    drawn = [poisson_draw(1000, 0.5, source).tolist() for source in (same_seed, generator)]
    assert drawn[0] != drawn[1]


def test_probability_is_never_above_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 0.3
    below = math.floor(rate * 2**32)
    grid = torch.tensor([below - 1, below, below + 1])
    monkeypatch.setattr(Coins, "words", lambda *args: grid)
    assert below / 2**32 < rate  # so that a plain comparison would include one value too many
    assert poisson_draw(3, rate, coins(0)).tolist() == [0]


def test_low_rate_is_exact_beyond_the_grid_of_the_uniforms() -> None:
    """With fp32 uniforms the probability would be 2^-24, four times the rate."""
    rate, num_samples, generator = 2.0**-26, 2**26, seeded(4)
    sizes = [len(poisson_draw(num_samples, rate, generator)) for _ in range(400)]
    assert_chi2(sum((size - 1) ** 2 for size in sizes), 400)


def test_rate_one_draws_everybody() -> None:
    sampler = UniformWithReplacementSampler(num_samples=5, sample_rate=1.0)
    assert list(sampler) == [[0, 1, 2, 3, 4]]


def test_coins_are_functions_of_key_batch_and_item() -> None:
    """In any order, and from any item on; other batches and keys have others."""
    one = coins(3).words(0, 5000)
    assert torch.equal(coins(3).words(1234, 5000), one[1234:])
    gaps = coins(3).uniforms(0, 500)
    assert torch.equal(coins(3).uniforms(123, 500), gaps[123:])
    for other in (coins(4), coins(3 + 2**32), coins(3, seed=1), replace(coins(3), secure=True)):
        assert (other.words(0, 5000) == one).float().mean() < 0.01
        assert (other.uniforms(0, 500) == gaps).float().mean() < 0.01


def test_the_global_seed_changes_nothing() -> None:
    sampler = UniformWithReplacementSampler(num_samples=50, sample_rate=0.2)
    epochs = []
    for _ in range(2):
        torch.manual_seed(7)
        epochs.append(list(sampler))
    assert epochs[0] != epochs[1]
    torch.manual_seed(7)
    assert list(UniformWithReplacementSampler(num_samples=50, sample_rate=0.2)) not in epochs


def test_a_pass_that_was_left_early_is_not_drawn_again() -> None:
    sampler = UniformWithReplacementSampler(
        num_samples=200, sample_rate=0.2, generator=seeded(), steps=5
    )
    starts = [next(iter(sampler)) for _ in range(3)]
    assert starts[0] != starts[1] != starts[2] != starts[0]
    sampler.generator = seeded()  # the same seed again
    assert next(iter(sampler)) not in starts


def test_empty_batches_are_yielded() -> None:
    sampler = UniformWithReplacementSampler(num_samples=2, sample_rate=0.01, generator=seeded())
    batches = list(sampler)
    assert len(batches) == len(sampler) == 100
    assert batches.count([]) > 50


def test_reproducible_but_different_each_epoch(reproducible: None) -> None:
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


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("total", "rate"), [(60, 0.2), (1000, 2.0**-13)])
def test_one_seed_gives_the_same_batches_on_any_number_of_ranks(
    on_ranks, shuffle: bool, total: int, rate: float
) -> None:
    steps = 30 if rate > 0.1 else 300
    alone = UniformWithReplacementSampler(
        num_samples=total, sample_rate=rate, generator=seeded(), steps=steps
    )
    want = list(alone) + list(alone)
    assert 0.05 < sum(map(len, want)) / len(want) < 20
    for world_size in (1, 2, 4):
        samplers = on_ranks(
            world_size, total_size=total, sample_rate=rate, shuffle=shuffle, steps=steps
        )
        parts = zip(*(list(s) + list(s) for s in samplers), strict=True)
        assert [sorted(int(i) for i in chain(*part)) for part in parts] == want


def test_who_fills_a_truncated_batch_does_not_depend_on_the_last_item(on_ranks) -> None:
    """Neighbours must differ in one item on one rank: truncation is counted rank by rank."""

    def shares(total: int) -> list[set[int]]:
        samplers = on_ranks(3, total_size=total, sample_rate=1.0)
        for sampler in samplers:
            sampler.most = total
            sampler.set_epoch(2)
        return [set(next(iter(sampler))) for sampler in samplers]

    (few, more) = (shares(40), shares(41))
    assert sorted(len(b - a) for a, b in zip(few, more, strict=True)) == [0, 0, 1]
    assert all(a <= b for a, b in zip(few, more, strict=True))


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


def test_the_rate_at_which_steps_are_counted_is_fixed() -> None:
    sampler = UniformWithReplacementSampler(num_samples=100, sample_rate=0.1)
    sampler.sample_rate = 0.1
    with pytest.raises(AttributeError, match=r"stays 0\.1, got 0\.9: steps are counted at it"):
        sampler.sample_rate = 0.9
    assert sampler.sample_rate == 0.1
