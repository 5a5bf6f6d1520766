"""The checks of canaries keep their false-alarm rate, on numbers as the promise says they are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opacus.auditing.checks import Observed, check_all

RUNS, ALPHA = 150, 0.1


def honest(random: np.random.Generator, steps: int, canaries: int, rate: float) -> Observed:
    """What a mechanism releases whose every canary adds C."""
    sigma = np.linspace(0.8, 1.2, steps)
    included = random.random(canaries) < 0.5
    drawn = (random.random((steps, canaries)) < rate) & included
    values = random.normal(size=(steps, canaries)) + drawn / sigma[:, None]
    return Observed(values, sigma, included, rate, steps)


@pytest.mark.parametrize(("steps", "canaries", "rate"), [(30, 128, 0.5), (60, 100, 1.0)])
def test_false_alarms_are_as_rare_as_stated(steps: int, canaries: int, rate: float) -> None:
    """At most 10% of runs and three standard deviations of that; a failure has chance 0.1%."""
    random, failed = np.random.default_rng(0), 0
    for _ in range(RUNS):
        findings = check_all(honest(random, steps, canaries, rate), ALPHA)
        failed += not all(finding.ok for finding in findings)
    assert failed <= RUNS * ALPHA + 3 * math.sqrt(RUNS * ALPHA * (1 - ALPHA))


def test_too_few_steps_to_see_anything_is_a_failure() -> None:
    observed = honest(np.random.default_rng(1), 4, 64, 0.01)
    failed = [finding.name for finding in check_all(observed, 1e-3) if not finding.ok]
    assert failed == ["power"]
