"""Sums that are rounded to a grid which depends on no data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.kernels.noise.gaussian import grid_of
from tests.helpers import problems

B, SIGMA, CLIP = 8, 3.0, 0.7
STD = SIGMA * CLIP


def sums(mode: str, secure: bool = False, **kw: Any) -> Tensor:
    """The noised sums of a step."""
    model = problems.build("mlp")
    made: Any = PrivacyEngine(secure_mode=secure).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(torch.zeros(B, 1)), batch_size=B, shuffle=secure),
        noise_multiplier=SIGMA, max_grad_norm=CLIP, grad_sample_mode=mode,
        poisson_sampling=False, loss_reduction="sum",
        noise_generator=None if secure else torch.Generator().manual_seed(3), **kw,
    )  # fmt: skip
    x, y = problems.PROBLEMS["mlp"].batch(B)
    loss = made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction="sum")
    loss(made[0](x), y).backward()
    made[1].step()
    return torch.cat([p.grad.flatten() for p in made[1].params])


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_released_sums_are_multiples(mode: str) -> None:
    part = 2.0**-6
    grid = grid_of(STD, part)
    assert grid == part * 2.0 and math.log2(grid).is_integer()
    plain, rounded = sums(mode), sums(mode, release_grid=part)
    assert not torch.equal(plain / grid, (plain / grid).round())
    assert torch.equal(rounded, (plain / grid + 0.5).floor() * grid)  # the same noise
    assert 0.3 * grid < (plain - rounded).abs().max() <= 0.5 * grid * (1 + 1e-5)


def test_secure_mode_takes_the_grid_that_is_given() -> None:
    fine, coarse = sums("ghost", True), sums("ghost", True, release_grid=2.0**-6)
    for values, part in ((fine, 2.0**-16), (coarse, 2.0**-6)):
        steps = (values / grid_of(STD, part)).double()
        assert torch.equal(steps, steps.round())
    assert not torch.equal(fine / grid_of(STD, 2.0**-6), (fine / grid_of(STD, 2.0**-6)).round())


@pytest.mark.parametrize("part", [0.0, -0.5, 0.3, 2.0, math.nan])
def test_what_is_no_grid_is_refused(part: float) -> None:
    with pytest.raises(ValueError, match="power of two"):
        sums("hooks", release_grid=part)
