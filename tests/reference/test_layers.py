"""Per-sample gradients and norms of every kind of layer, against Opacus 1.6.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.reference.comparison import assert_same, same
from tests.reference.layers import CASES, LAYERS, right

pytestmark = pytest.mark.reference
BOUNDS = {"rtol": 1e-7, "atol": 1e-6}  # float64; a norm of 1e-8 is the root of rounding errors
Both = Callable[[str], tuple[Any, Any]]


@pytest.mark.parametrize("name, mode", [c for c in CASES if not LAYERS[c[0]].wrong])
def test_same_as_opacus(both: Both, name: str, mode: str) -> None:
    ours, theirs = both(f"{name}-{mode}")
    assert_same(ours, theirs, **BOUNDS)
    assert any(value.abs().max() > 0.1 for value in ours.values())


@pytest.mark.parametrize(
    "name, mode", [pytest.param(*c, id=f"{c[0]}-{c[1]}") for c in CASES if LAYERS[c[0]].wrong]
)
def test_right_where_opacus_is_wrong(both: Both, name: str, mode: str) -> None:
    ours, theirs = both(f"{name}-{mode}")
    assert_same(ours, right(name, mode), **BOUNDS)
    assert not same(theirs, ours, **BOUNDS), f"no longer so: {LAYERS[name].wrong}"
