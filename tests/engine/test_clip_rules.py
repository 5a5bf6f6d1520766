"""Normalised clipping and PSAC: what one sample can add, and the sums of every mode; DPAdamW."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.privacy.clipping import FLAT_RULES, clip_flat
from opacus.optimizers.adam import DPAdamW
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import problems
from tests.helpers.distributed import progress, run_distributed

RULES = sorted(FLAT_RULES)
NEW = ["normalised", "psac"]
B, CLIP = 8, 0.3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [1e-3, 1.0, 7.5])
def test_no_sample_adds_more_than_c(rule: str, clip: float) -> None:
    norms = torch.cat([torch.logspace(-9, 9, 400), torch.tensor([0.0])]).double()
    clipped = clip_flat(norms, clip, rule)
    added = clipped.factors * norms
    assert (added <= clip * (1 + 1e-12)).all() and added.max() > 0.99 * clip
    assert torch.isfinite(clipped.factors).all() and added[-1] == 0
    assert (added[:-1].diff() >= -1e-12 * clip).all()  # a longer gradient never adds less
    bad = clip_flat(torch.tensor([math.nan, math.inf, 1.0]), clip, rule)
    assert bad.excluded.tolist() == [True, True, False] and bad.factors[:2].tolist() == [0, 0]


def test_small_gradients_are_treated_as_the_papers_say() -> None:
    norms = torch.tensor([1e-4, 0.1, 10.0]).double()
    got = clip_flat(norms, 2.0, "normalised").factors
    torch.testing.assert_close(got, 2.0 / (norms + 0.01))
    got = clip_flat(norms, 2.0, "psac").factors
    torch.testing.assert_close(got, 2.0 / (norms + 0.1 / (norms + 0.1)))
    assert got[0] < clip_flat(norms, 2.0, "normalised").factors[0] / 50


def private(module: nn.Module, mode: str, rule: str, **kw: Any) -> Any:
    made: Any = PrivacyEngine().make_private(
        module=module,
        optimizer=kw.pop("optimizer", None) or torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(B, 1)), batch_size=B),
        grad_sample_mode=mode, clipping=rule, poisson_sampling=False,
        **{"noise_multiplier": 0.0, "max_grad_norm": CLIP, **kw},
    )  # fmt: skip
    return made if len(made) == 4 else (*made[:2], nn.CrossEntropyLoss(), made[2])


def step(made: Any, x: Tensor, y: Tensor) -> None:
    made[1].zero_grad()
    made[2](made[0](x), y).backward()
    made[1].step()


def wanted(rule: str) -> list[Tensor]:
    """Mean of the clipped gradients, one sample at a time in float64."""
    model = problems.build("mlp", dtype=torch.float64)
    grads = problems.per_sample("mlp", model, *problems.PROBLEMS["mlp"].batch(B))
    norms = torch.stack([torch.sqrt(sum(g.square().sum() for g in grad)) for grad in grads])
    assert norms.min() < 1.5 and norms.max() > 2 * CLIP
    factors = FLAT_RULES[rule](norms, CLIP)
    columns = zip(*grads, strict=True)
    return [sum(f * g for f, g in zip(factors, c, strict=True)) / B for c in columns]


@pytest.mark.parametrize("rule", NEW)
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost", "ghost_bk"])
def test_sums_are_those_of_the_rule(mode: str, rule: str) -> None:
    made = private(problems.build("mlp", dtype=torch.float64), mode, rule)
    x, y = problems.PROBLEMS["mlp"].batch(B)
    step(made, x.double(), y)
    assert made[1].plan.clipping == rule
    got = [p.grad for p in made[1].params]
    torch.testing.assert_close(got, wanted(rule), rtol=1e-9, atol=1e-12)
    assert (got[0] - wanted("flat")[0]).norm() > 1e-3 * got[0].norm()


def sums_of_rank(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    found = {}
    for rule in NEW:
        progress(rule)
        model = FSDP2Wrapper(problems.build("mlp", dtype=torch.float64))
        made = private(model, "ghost_fsdp_bk", rule)
        x, y = problems.PROBLEMS["mlp"].batch(B)
        step(made, x.double()[rank::world_size], y[rank::world_size])
        found[rule] = [p.grad.full_tensor() for p in made[1].params]
    return found


def test_ranks_sum_by_the_rule() -> None:
    for found in run_distributed(sums_of_rank, 2):
        for rule in NEW:
            torch.testing.assert_close(found[rule], wanted(rule), rtol=1e-9, atol=1e-12)


def test_what_has_no_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="finite max_grad_norm"):
        private(problems.build("mlp"), "hooks", "psac", max_grad_norm=math.inf)


# --- DPAdamW ---


def test_without_noise_it_is_adamw() -> None:
    models = [problems.build("mlp", dtype=torch.float64) for _ in range(2)]
    ours = DPAdamW(models[0].parameters(), lr=0.01, floor=1e-30, weight_decay=0.1)
    torchs = torch.optim.AdamW(models[1].parameters(), lr=0.01, eps=0.0, weight_decay=0.1)
    x, y = problems.PROBLEMS["mlp"].batch(B)
    for _ in range(5):
        for model, optimizer in zip(models, (ours, torchs), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_second_moments_are_without_the_noise() -> None:
    """20,000 elements, signal 0.02, noise 1 that halves: the mean is right to 5 standard errors."""
    g = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    optimizer = DPAdamW([parameter], lr=0.0, betas=(0.9, 0.99), floor=1e-30)
    for number in range(300):
        optimizer.noise_std = 1.0 if number < 250 else 0.5
        noise = torch.randn(20_000, generator=g, dtype=torch.float64)
        parameter.grad = 0.02 + optimizer.noise_std * noise
        optimizer.step()
    square = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.99**300)
    noise_share = optimizer.param_groups[0]["noise"] / (1 - 0.99**300)
    assert 0.5 < noise_share < 0.8  # both levels count
    error = 5 * float((square).std()) / math.sqrt(20_000)
    assert abs(float((square - noise_share).mean()) - 0.02**2) < error < 0.01


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_it_is_told_the_noise_of_a_private_step(mode: str) -> None:
    model = problems.build("mlp")
    own = DPAdamW(model.parameters(), lr=0.01)
    made = private(model, mode, "flat", optimizer=own, noise_multiplier=4.0)
    x, y = problems.PROBLEMS["mlp"].batch(B)
    for _ in range(3):
        step(made, x, y)
    assert own.noise_std == pytest.approx(4.0 * CLIP / B)
    assert own.param_groups[0]["noise"] == pytest.approx(own.noise_std**2 * (1 - 0.999**3))
    state = own.state_dict()
    again = DPAdamW(model.parameters(), lr=0.01)
    again.load_state_dict(state)
    assert again.param_groups[0]["steps"] == 3 and again.param_groups[0]["noise"] > 0


def test_values_out_of_range() -> None:
    for kw in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"floor": 0.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError):
            DPAdamW([nn.Parameter(torch.zeros(1))], **kw)
