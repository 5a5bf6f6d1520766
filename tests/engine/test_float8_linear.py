"""Linear layers of torchao that compute in float8: rowwise scales are exact, others are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.rules.float8 import coupled_by_scales
from opacus.validators import ModuleValidator
from tests.helpers import oracle
from tests.helpers.replayed_blocks import private

float8 = pytest.importorskip("torchao.float8")
B, T, D = 4, 3, 16


def converted(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D), nn.Linear(D, 3))
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(
        model,
        config=replace(config, emulate=True),
        module_filter_fn=lambda module, name: name != "3",
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(B, T, D) * torch.linspace(0.3, 3, B).view(B, 1, 1)
    return x, torch.randint(3, (B, T))


def loss_of(model: nn.Module, data: Any) -> Tensor:
    logits = model(data[0])
    return nn.functional.cross_entropy(logits.transpose(1, 2), data[1], reduction="none").sum(1)


@pytest.mark.parametrize("mode", ["ghost_bk", "ghost", "hooks"])
def test_rowwise_scales_with_a_weight_gradient_in_high_precision_are_exact(mode: str) -> None:
    model = converted("rowwise_with_gw_hp")
    assert type(model[0]).__name__ == "Float8Linear"
    x, y = batch()
    grads = oracle.per_sample_gradients(copy.deepcopy(model), loss_of, (x, y))
    norms = oracle.norms(grads)
    clip = float(norms.median())
    assert (norms > 1.01 * clip).any() and (norms < 0.99 * clip).any()
    made = private(model, clip, mode, (x, y))
    logits = made[0](x)
    if mode == "hooks":
        loss_of(lambda _: logits, (x, y)).sum().backward()
    else:
        made[2](logits.flatten(0, 1), y.flatten(), shape=logits.shape).backward()
    made[1].step()
    want = oracle.clipped_sum(grads, clip)
    for name, parameter in model.named_parameters():
        assert oracle.relative_error(parameter.grad, want[name]) < 1e-5, name


@pytest.mark.parametrize("frozen", [False, True])
def test_tensorwise_scales_are_refused_by_name(frozen: bool) -> None:
    model = converted("tensorwise")
    model[0].requires_grad_(not frozen)
    model[2].requires_grad_(not frozen)
    with pytest.raises(ValueError, match=r"'0' \(Float8Linear\): its input.*tensorwise.*rowwise_"):
        private(model, 1.0, "ghost_bk")
    assert len(ModuleValidator.validate(model)) == 2


def test_why_they_are_refused() -> None:
    """One sample's outlier moves what the others contribute."""
    x, y = batch()
    moved = {}
    for recipe in ("tensorwise", "rowwise_with_gw_hp"):
        model = converted(recipe)
        without = []
        for data in (x, torch.cat([x[:-1], 1e6 * x[-1:]])):
            model.zero_grad()
            loss_of(model, (data, y))[:-1].sum().backward()
            without.append(model[2].weight.grad.clone())
        moved[recipe] = oracle.relative_error(without[1], without[0])
    assert moved["tensorwise"] > 0.1 and moved["rowwise_with_gw_hp"] < 1e-6


def test_delayed_scales_are_refused() -> None:
    model = converted("rowwise_with_gw_hp")
    assert coupled_by_scales(model[0]) is None and coupled_by_scales(nn.Linear(2, 2)) is None

    class Delayed:
        name = "DELAYED"

    class Cast:
        scaling_type, scaling_granularity = Delayed, model[0].config.cast_config_input

    Cast.scaling_granularity = model[0].config.cast_config_input.scaling_granularity
    config = copy.copy(model[0].config)
    object.__setattr__(config, "cast_config_grad_output", Cast)
    model[0].config = config
    assert "gradient of the output is cast to float8 with delayed" in coupled_by_scales(model[0])
