"""After a step that failed, the next one is that of a fresh model, and counts once."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.distributed import attempt
from tests.helpers.failures import (
    DP,
    OF_ALL,
    OF_GHOST,
    OF_RULES,
    Training,
    batch,
    build,
    failing,
    want,
)

PLACES = {
    mode: OF_ALL + OF_RULES * (mode not in ("functorch", "ew")) + OF_GHOST * (mode not in DP[:3])
    for mode in DP
}


def fail(training: Training, place: str) -> None:
    with failing(place), pytest.raises(BaseException) as caught:
        training.step(batch(1))
    assert not isinstance(caught.value, (AssertionError, AttributeError)), caught.value


def released(training: Training) -> list[torch.Tensor]:
    return [p.grad for p in training.net.parameters()]


def check_good_step(training: Training, mode: str, rows: int) -> None:
    """The next step is right, and as a fresh model's."""
    good, counted = batch(2, rows), training.steps
    training.step(good)
    assert training.steps == counted + 1
    fresh = Training(mode)
    fresh.step(good)
    for got, same, exact in zip(
        released(training), released(fresh), want(build(), good), strict=True
    ):
        # A lone sample runs in another way once a model is known: other rounding.
        assert torch.equal(got, same) if rows > 1 else torch.allclose(got, same, rtol=1e-5)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cleared", [True, False], ids=["zero_grad", "nothing"])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("mode", DP)
def test_the_next_step(mode: str, warm: bool, cleared: bool) -> None:
    failed = [
        f"{place}, {rows} rows:\n{trace}"
        for place in PLACES[mode]
        for rows in (4, 1)
        if (trace := attempt(fails_and_goes_on, mode, place, warm, cleared, rows))
    ]
    assert not failed, "\n".join(failed)


def fails_and_goes_on(mode: str, place: str, warm: bool, cleared: bool, rows: int) -> None:
    training = Training(mode)
    if warm:
        training.step(batch(3))
        training.optimizer.zero_grad()
        training.model.isolation.schedule.doubt()  # it looks at each of the batches
    before = training.steps
    fail(training, place)
    assert training.steps == before  # it has released nothing
    if cleared:
        training.optimizer.zero_grad()
    check_good_step(training, mode, rows)


@pytest.mark.parametrize("mode", DP)
def test_a_loss_that_is_nan_is_a_step(mode: str) -> None:
    """Its samples contribute nothing, which no one can see for the noise: it counts."""
    training = Training(mode)
    x, y = batch(1)
    training.step((x * math.nan, y))
    assert training.steps == 1
    assert all(not p.grad.any() for p in training.net.parameters())
    training.optimizer.zero_grad()
    check_good_step(training, mode, 6)
