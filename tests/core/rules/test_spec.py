"""What a layer's spec says, and which rule a layer gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from opacus.core.record.layers import layers_of
from opacus.core.rules import RULES, LayerRule, LinearRule, register_rule, rule_for
from opacus.core.rules.base import check_batch
from opacus.core.rules.generic import GenericRule
from opacus.core.rules.spec import LayerSpec, layer_kind, make_spec
from tests.core.rules.cases import call_of, spec_of


def test_a_spec_has_the_trainable_parameters_of_the_layer_alone() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    assert spec_of("block", layer).params == ()
    attention = spec_of("block.attention", layer.self_attn)
    assert attention.params == ("in_proj_weight", "in_proj_bias")
    assert attention.shapes == {"in_proj_weight": (12, 4), "in_proj_bias": (12,)}
    layer.linear1.bias.requires_grad_(False)
    spec = spec_of("block.linear1", layer.linear1)
    assert (spec.name, spec.kind, spec.params) == ("block.linear1", nn.Linear, ("weight",))
    assert spec.shapes == {"weight": (8, 4)}


def test_a_spec_cannot_change() -> None:
    spec = spec_of("", nn.Linear(2, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]


def test_options_are_what_the_rule_asked_for() -> None:
    layer = nn.GroupNorm(2, 4, eps=0.5)
    assert rule_for(layer).options(layer)["eps"] == 0.5
    (found,) = layers_of(nn.ModuleDict({"norm": layer}))
    assert found.spec.options == rule_for(layer).options(layer)
    assert make_spec("", layer, {"mine": 1}).options == {"mine": 1}


class Halves(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class ParametrizedByName(nn.Linear):
    """A user's class that only sounds like one made by parametrize."""


def test_kinds_are_seen_through_parametrize() -> None:
    for kind in (nn.Linear, ParametrizedByName):
        layer = kind(2, 3)
        parametrize.register_parametrization(layer, "weight", Halves())
        assert type(layer) is not kind
        assert layer_kind(layer) is kind
        assert spec_of("", layer).params == ("bias",)
    assert isinstance(rule_for(layer.parametrizations.weight), GenericRule)


def test_kinds_are_seen_through_fsdp_and_ddp(one_rank: None) -> None:
    layer = nn.Linear(2, 3)
    assert layer_kind(DistributedDataParallel(layer)) is nn.Linear
    parametrize.register_parametrization(layer, "weight", Halves())
    fully_shard(layer)
    assert type(layer) is not nn.Linear
    assert layer_kind(layer) is nn.Linear
    sharded = fully_shard(nn.Linear(5, 3))
    assert spec_of("", sharded).shapes == {"weight": (3, 5), "bias": (3,)}
    assert isinstance(rule_for(sharded), LinearRule)


def test_rules_go_by_the_exact_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    monkeypatch.setattr("opacus.core.rules.RULES", dict(RULES))
    assert isinstance(rule_for(Doubles(2, 3)), GenericRule)
    rule = LinearRule()
    register_rule(Doubles, rule)
    assert rule_for(Doubles(2, 3)) is rule
    assert Doubles not in RULES


def test_a_rule_needs_per_sample_gradients_only() -> None:
    class Doubling(LayerRule):
        def per_sample_grad(
            self, spec: LayerSpec, activations: Any, backprops: Any
        ) -> dict[str, Tensor]:
            return {"w": 2 * activations[0] * backprops}

    rule, spec = Doubling(), LayerSpec("l", nn.Module, ("w",), {"w": (3,)}, {})
    x, g, factors = torch.randn(4, 3), torch.randn(4, 3), torch.rand(4)
    grads = 2 * x * g
    torch.testing.assert_close(rule.norm_sq(spec, (x,), g)["w"], grads.square().sum(1))
    total = rule.weighted_grad(spec, (x,), g, factors)["w"]
    torch.testing.assert_close(total, (factors[:, None] * grads).sum(0))
    torch.testing.assert_close(rule.weighted_grad(spec, (x,), g, None)["w"], grads.sum(0))
    assert rule.join(spec, [((x,), g), ((x,), g)]) is None


def test_backprops_of_another_batch_are_named() -> None:
    spec = spec_of("net.layer", nn.Linear(2, 3))
    x, g = torch.randn(4, 2), torch.randn(4, 3)
    check_batch(spec, (x,), g, 4)
    check_batch(spec, (x,), (g, torch.randn(4)), 4)
    for wrong in (g[:3], (g, torch.randn(5)), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"net\.layer.*Linear.*batch of 4.*\[4, 2\]"):
            check_batch(spec, (x,), wrong, 4)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("replace", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 2), lambda: nn.Conv1d(3, 2, 1)])
def test_layers_whose_weight_comes_from_others_are_generic(
    replace: Callable[[nn.Module], nn.Module], build: Callable[[], nn.Module]
) -> None:
    layer = replace(build())
    assert isinstance(rule_for(layer), GenericRule)
    assert set(spec_of("", layer).params) > {"bias"}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_gradients_of_a_weight_norm_by_hooks() -> None:
    layer = nn.utils.weight_norm(nn.Linear(3, 2).double())
    x, g = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    rule, spec = rule_for(layer), spec_of("", layer)
    got = rule.per_sample_grad(spec, call_of(layer, x), g)
    assert got.keys() == {"weight_g", "weight_v", "bias"}
    parameters = [layer.get_parameter(name) for name in got]
    for i in range(4):
        want = torch.autograd.grad((layer(x[i : i + 1]) * g[i : i + 1]).sum(), parameters)
        for name, grad in zip(got, want, strict=True):
            torch.testing.assert_close(got[name][i], grad)
