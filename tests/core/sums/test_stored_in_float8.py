"""Per-sample gradients that are stored in float8: what is summed is what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from opacus.core.kernels.sums.float8 import Rounded, rounded, scaled_factors
from opacus.core.kernels.sums.weighted_sum import weighted_sum
from opacus.core.sums import rounding as module
from opacus.core.sums.planner import Planner
from opacus.core.sums.rounding import Rounding
from tests.helpers import oracle
from tests.helpers.replayed_blocks import B, batch, build, close, loss_of, private, step, ways

KEY = bytes(range(32))
CHOICE = Planner._choice


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Everything that may be stored is stored, small gradients in float8, too; what was stored."""
    found: dict[str, Tensor] = {}
    original = Rounding.__call__

    def seen(self: Rounding, owner: str, grads: Tensor) -> Rounded | None:
        fewer = original(self, owner, grads)
        assert fewer is not None and fewer.values.dtype == torch.float8_e4m3fn
        scales = fewer.scales.view(-1, *[1] * (grads.dim() - 1))
        found[owner.removeprefix("_module.")] = fewer.values.double() * scales
        return fewer

    monkeypatch.setattr(module, "ROUNDED_ELEMENTS", 1)
    monkeypatch.setattr(Rounding, "__call__", seen)
    monkeypatch.setattr(Planner, "_choice", lambda s, r: replace(CHOICE(s, r), what="store"))
    return found


def wanted(
    grads: dict[str, Tensor], stored: dict[str, Tensor], planner: Planner, clip: float
) -> tuple[dict[str, Tensor], Tensor]:
    """The clipped sum and norms of what was stored, and of exact gradients where a block ran
    again."""
    again = {name for name, choice in planner.report.choices.items() if choice.what == "replay"}
    mixed = {
        name: grad if name.rsplit(".", 1)[0] in again else stored.get(name, grad)
        for name, grad in grads.items()
    }
    return oracle.clipped_sum(mixed, clip), oracle.norms(mixed)


@pytest.mark.parametrize(
    ("mode", "budget", "replays"),
    [("flash_bk", None, 0), ("ghost_bk", 1 << 30, 0), ("ghost_bk", 36_000, 6), ("ghost_bk", 0, 12)],
)
def test_the_bound_is_of_what_is_stored(
    mode: str, budget: int | None, replays: int, stored: dict[str, Tensor]
) -> None:
    model = build()
    grads = oracle.per_sample_gradients(model, loss_of, batch())
    clip = float(oracle.norms(grads).median()) * 0.9
    made = private(model, clip, mode)
    made[0].stored_dtype = "float8"
    made[0].held_budget = budget
    got = step(made)
    want, norms = wanted(grads, stored, made[0]._strategy.planner, clip)
    close(got, want)
    torch.testing.assert_close(
        made[0].per_sample_gradient_norms, norms, rtol=1e-9, atol=0, check_dtype=False
    )
    assert (norms > clip * 1.01).any() and (norms < clip).any()
    assert sum(way == "replay" for way in ways(made[0]).values()) == replays
    exact = oracle.clipped_sum(grads, clip)
    apart = max(oracle.relative_error(got[n], exact[n]) for n in got)
    assert 1e-3 < apart < 0.2  # rounding shows
    # A bound that was taken before rounding would be another one.
    assert not torch.allclose(norms, oracle.norms(grads), rtol=1e-5)


def test_units_that_are_not_finite_add_nothing(stored: dict[str, Tensor]) -> None:
    made = private(build(), 0.2)
    made[0].stored_dtype = "float8"
    x, y = batch()
    x[2, 1] = torch.nan
    got = step(made, (x, y))
    assert all(bool(g.isfinite().all()) for g in got.values())
    rest = [0, 1, 3, 4]
    stored = {name: grad[rest] for name, grad in stored.items()}
    close(got, oracle.clipped_sum(stored, 0.2))


def test_rounding_is_right_on_average_and_repeats() -> None:
    torch.manual_seed(0)
    grads = torch.randn(2, 300)
    total = torch.zeros_like(grads)
    for number in range(400):
        found = rounded(grads, KEY, number)
        total += found.values.float() * found.scales[:, None]
    step_size = grads.abs().clamp(min=1e-2) / 8
    assert bool(((total / 400 - grads).abs() < 6 * step_size / math.sqrt(400)).all())
    again = rounded(grads, KEY, 399)
    assert torch.equal(again.values.view(torch.uint8), found.values.view(torch.uint8))
    other = rounded(grads, KEY[::-1], 399)
    assert not torch.equal(other.values.view(torch.uint8), found.values.view(torch.uint8))
    near = torch.randn(1, 50).to(torch.float8_e4m3fn).float()  # numbers of float8 stay
    near[0, 0] = 448
    assert torch.equal(rounded(near, KEY, 0).values.float(), near)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_norms_are_of_what_is_stored(dtype: torch.dtype, scale: float) -> None:
    grads = (torch.randn(B, 3, 7, dtype=torch.float64) * scale).to(dtype)
    found = rounded(grads, KEY, 1)
    back = found.values.double() * found.scales.double().view(B, 1, 1)
    if scale >= 1:
        torch.testing.assert_close(
            found.norm_sq.double(), back.square().sum((1, 2)), rtol=1e-5, atol=0
        )
    factors, excluded = torch.rand(B, dtype=found.scales.dtype), torch.arange(B) == 2
    own = scaled_factors(factors, found.scales, excluded)
    want = (factors.double().masked_fill(excluded, 0).view(B, 1, 1) * back).sum(0)
    got = weighted_sum(found.values, own, excluded)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6 * scale)


def test_it_is_asked_for_by_name() -> None:
    made = private(build(), 0.2)
    assert made[0].stored_dtype is None
    with pytest.raises(ValueError, match="must be 'float8' or None, got 'int4'"):
        made[0].stored_dtype = "int4"
    two_passes: Any = private(build(), 0.2, "ghost")[0]
    with pytest.raises(ValueError, match="stored_dtype: only the _bk modes keep"):
        two_passes.stored_dtype = "float8"
