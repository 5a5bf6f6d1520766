"""Models that take batches of one size, or of several samples, are compared by copies of a sample."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus import IsolationError
from tests.helpers.isolation import MODES, private, step, vectors


class Sized(nn.Module):
    """What meets in NumPy is not followed; alone, and beside copies, no sample has others."""

    def __init__(self, takes: Any, *, coupled: bool) -> None:
        super().__init__()
        self.takes, self.coupled = takes, coupled
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.takes(len(x)):
            raise ValueError(f"no batch of {len(x)}")
        h = self.a(x).tanh()
        if self.coupled:
            h = h * torch.from_numpy((h.detach().numpy() > 0).mean(0)).to(h)
        return self.b(h)


# Number of samples, and what the model runs on: one size, as many as there are, three or more.
SIZES = [(8, lambda n: n == 8), (20, lambda n: n == 20), (8, lambda n: n > 2), (9, lambda n: n > 8)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "takes"), SIZES)
def test_they_are_compared(rows: int, takes: Any, mode: str) -> None:
    parts = private(Sized(takes, coupled=False), mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(parts, vectors(rows))
    assert parts[0].isolation.schedule.checks == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "takes"), SIZES)
def test_samples_that_depend_on_others(rows: int, takes: Any, mode: str) -> None:
    parts = private(Sized(takes, coupled=True), mode)
    with pytest.raises(IsolationError, match="is not its own"):
        step(parts, vectors(rows))
