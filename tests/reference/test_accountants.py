"""Epsilon and noise multipliers, against Opacus 1.6.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.reference.accountants import RUNS
from tests.reference.comparison import assert_same

pytestmark = pytest.mark.reference
Both = Callable[[str], tuple[Any, Any]]
# PRV is approximate: each package within an error of 0.01 of the truth.
BOUNDS = {"rdp": {"rtol": 1e-3}, "gdp": {"rtol": 1e-3}, "prv": {"rtol": 0.005, "atol": 0.01}}


@pytest.mark.parametrize("name", RUNS)
def test_same_epsilon_and_noise(both: Both, name: str) -> None:
    ours, theirs = both(name)
    assert_same(ours, theirs, **BOUNDS[name.split("-")[1]])
    number = ours.get("epsilon", ours.get("noise_multiplier"))
    assert 0.05 < number < 100.0
