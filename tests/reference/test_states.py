"""What one package saved, loaded by the other, goes on as it would have there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.reference.comparison import assert_same
from tests.reference.states import NAMES

pytestmark = pytest.mark.reference
Both = Callable[[Any], tuple[Any, Any]]


@pytest.mark.parametrize("name", NAMES)
def test_states_of_opacus_load_here(both: Both, name: str) -> None:
    assert_same(both((name, "loaded"))[0], both(name)[1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_our_states_load_in_opacus(both: Both, name: str) -> None:
    assert_same(both((name, "loaded"))[1], both(name)[0], rtol=1e-4, atol=2e-6)
