"""Verdicts and repairs of the validator, against Opacus 1.6.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.reference.comparison import assert_same
from tests.reference.validation import MODULES, RUNS

pytestmark = pytest.mark.reference
Both = Callable[[str], tuple[Any, Any]]


@pytest.mark.parametrize("name", RUNS)
def test_same_verdict_and_repair(both: Both, name: str) -> None:
    assert_same(*both(name), rtol=1e-5, atol=1e-6)


def test_verdicts_differ(both: Both) -> None:
    verdicts = [both(f"verdict-{name}")[0]["valid"] for name in MODULES]
    assert 8 <= sum(verdicts) <= len(verdicts) - 8
