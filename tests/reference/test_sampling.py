"""Batches of samplers and loaders on the same seeds, against Opacus 1.6.0."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, pvariance
from typing import Any

import pytest

from tests.reference.comparison import assert_same
from tests.reference.sampling import RATE, SAMPLES

pytestmark = pytest.mark.reference
Both = Callable[[str], tuple[Any, Any]]


@pytest.mark.parametrize("name", ["uniform", "uniform_steps", "loader"])
def test_same_batches(both: Both, name: str) -> None:
    assert_same(*both(name))


def test_sizes_are_binomial(both: Both) -> None:
    sizes = both("uniform_steps")[0]["sizes"]
    assert mean(sizes) == pytest.approx(SAMPLES * RATE, rel=0.05)
    assert pvariance(sizes) == pytest.approx(SAMPLES * RATE * (1 - RATE), rel=0.3)


def test_same_physical_batches(both: Both) -> None:
    ours, theirs = both("physical")
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)
    assert True in ours["skipped"] and max(ours["sizes"]) == 3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rank", range(3))
def test_same_shares_of_ranks_and_alike_batches(both: Both, rank: int, shuffle: bool) -> None:
    """Not the same coins: here the rank is in the seed. Opacus leaves out empty batches."""
    ours, theirs = both(f"distributed-{rank}-{shuffle}")
    assert (ours["len"], ours["shares"]) == (theirs["len"], theirs["shares"])
    assert len(ours["sizes"]) == 2 * ours["len"] >= len(theirs["sizes"])
    own, reference = ([size for size in r["sizes"] if size] for r in (ours, theirs))
    share = len(ours["shares"][0])
    # 800 batches: four standard errors of the difference of two means.
    bound = 4 * (2 * share * RATE * (1 - RATE) / len(reference)) ** 0.5
    assert abs(mean(own) - mean(reference)) < bound
    assert pvariance(own) == pytest.approx(pvariance(reference), rel=0.35)


def test_ranks_share_all_samples(both: Both) -> None:
    for package in range(2):
        shares = [both(f"distributed-{rank}-True")[package]["shares"][1] for rank in range(3)]
        assert sorted(i for share in shares for i in share) == list(range(SAMPLES))
