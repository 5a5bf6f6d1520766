"""Training on the same seeds, noise and adaptive clipping, against Opacus 1.6.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.reference.comparison import assert_same
from tests.reference.training import RUNS

pytestmark = pytest.mark.reference
Both = Callable[[str], tuple[Any, Any]]
TRAINED = [name for name in RUNS if name.startswith("train-")]


@pytest.mark.parametrize("name", TRAINED)
def test_same_clipped_sums_and_models(both: Both, name: str) -> None:
    ours, theirs = both(name)
    assert_same(ours, theirs, rtol=1e-4, atol=2e-6)  # float32
    assert max(float(total.abs().max()) for total in ours["sum"]) > 1e-3


def test_clipping_takes_part(both: Both) -> None:
    """The norm is below what the samples have, and summing is not averaging."""
    for mode in ("hooks", "ghost"):
        clipped, whole = both(f"train-mlp-{mode}")[0], both(f"train-plain_clip-{mode}")[0]
        sizes = [torch.cat([t.flatten() for t in r["sum"]]).norm() for r in (clipped, whole)]
        assert sizes[0] < 0.5 * sizes[1]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_noise_of_the_same_size(both: Both, mode: str) -> None:
    ours, theirs = both(f"noise-{mode}")
    for result in (ours, theirs):  # 40,000 numbers
        assert result["std"] == pytest.approx(1.7 * 0.4, rel=0.02)
        assert abs(result["mean"]) < 0.02


def test_same_adaptive_clipping_norms(both: Both) -> None:
    ours, theirs = both("adaptive")
    assert_same(ours, theirs, rtol=1e-5)
    assert len(set(ours["norms"])) > 8
