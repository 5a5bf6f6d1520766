"""Batches of samplers and loaders on the same seeds, against Opacus 1.6.0."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, pvariance
from typing import Any

import pytest

from tests.reference.sampling import RATE, SAMPLES

pytestmark = pytest.mark.reference
Both = Callable[[str], tuple[Any, Any]]


def test_sizes_are_binomial(both: Both) -> None:
    sizes = both("uniform_steps")[0]["sizes"]
    assert mean(sizes) == pytest.approx(SAMPLES * RATE, rel=0.05)
    assert pvariance(sizes) == pytest.approx(SAMPLES * RATE * (1 - RATE), rel=0.3)
