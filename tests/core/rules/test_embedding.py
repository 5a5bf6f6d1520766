"""Lookup tables: repeated rows, padding, bags, memory, settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.record.layers import layers_of
from opacus.core.rules import rule_for
from opacus.core.rules.generic import GenericRule
from tests.core.rules.cases import norm_sq, observe, spec_of
from tests.core.rules.dispatched import Dispatched
from tests.helpers.oracle import relative_error, weighted_sum


def test_the_padding_row_has_no_gradient_and_does_not_count() -> None:
    layer = nn.Embedding(5, 3, padding_idx=2)
    seen = observe(layer, torch.tensor([[2, 2, 2], [2, 4, 4], [0, 2, 1]]))
    grad = seen.rule.per_sample_grad(seen.spec, seen.activations, seen.backprops)["weight"]
    norms = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)["weight"]
    total = seen.rule.weighted_grad(seen.spec, seen.activations, seen.backprops, None)["weight"]
    assert not grad[:, 2].any() and not total[2].any()
    assert norms[0] == 0
    assert norms[1].item() == pytest.approx(seen.backprops[1, 1:].sum(0).square().sum().item())


def test_repeated_rows_are_added_before_the_norm() -> None:
    seen = observe(nn.Embedding(3, 2), torch.tensor([[1, 1, 1, 0]]))
    got = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)["weight"]
    g = seen.backprops[0]
    assert got.item() == pytest.approx((g[:3].sum(0).square().sum() + g[3].square().sum()).item())
    assert abs(got.item() - g.square().sum().item()) > 1e-3


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_norms_of_a_large_table_need_little_memory_and_no_wait(kind: Any) -> None:
    rows, batch, tokens, d = 50_000, 8, 6, 4
    layer = kind(rows, d)
    spec, rule = spec_of("", layer), rule_for(layer)
    ids = torch.randint(0, rows, (batch, tokens))
    backprops = torch.randn(batch, tokens, d) if kind is nn.Embedding else torch.randn(batch, d)
    with Dispatched() as seen:
        rule.norm_sq(spec, (ids,), backprops)
    assert 0 < seen.largest <= batch * tokens * 8 * d
    assert seen.names and not seen.waits
    with Dispatched() as formed:  # the check above can fail
        rule.per_sample_grad(spec, (ids,), backprops)
    assert formed.largest >= batch * rows * d * 4


def model_of(name: str, layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"net": nn.ModuleDict({name: layer})})


@pytest.mark.parametrize("setting", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_settings_that_mix_samples_are_refused(kind: Any, setting: dict[str, Any]) -> None:
    mode = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
    with pytest.raises(ValueError, match=rf"net\.table.*{kind.__name__}.*{next(iter(setting))}"):
        layers_of(model_of("table", kind(4, 3, **setting, **mode)))


@pytest.mark.parametrize("frozen", [False, True])
def test_tables_that_change_in_the_forward_pass_are_refused_in_all_modes(frozen: bool) -> None:
    """Also where the generic rule would do, and where nobody trains the table."""
    model = model_of("table", nn.Embedding(4, 3, max_norm=1.0).requires_grad_(not frozen))
    with pytest.raises(ValueError, match=r"net\.table.*Embedding.*max_norm"):
        layers_of(model, GenericRule)


def test_bags_by_maximum_are_refused() -> None:
    with pytest.raises(ValueError, match=r"net\.bag.*EmbeddingBag.*max"):
        layers_of(model_of("bag", nn.EmbeddingBag(4, 3, mode="max")))


IDS = torch.tensor([1, 1, 3, 0, 2, 2, 2])
OFFSETS = torch.tensor([0, 3, 3, 5])  # the second bag is empty


def bag_gradients(layer: nn.EmbeddingBag, backprops: Tensor, weights: Tensor | None) -> Tensor:
    """``[B, V, d]``, each bag alone."""
    ends = [*OFFSETS[1:].tolist(), len(IDS)]
    grads = []
    for start, stop, g in zip(OFFSETS.tolist(), ends, backprops, strict=True):
        given = None if weights is None else weights[start:stop]
        out = layer(IDS[start:stop], torch.zeros(1, dtype=torch.long), given)
        grads.append(torch.autograd.grad(out, layer.weight, g[None])[0])
    return torch.stack(grads)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_by_offsets(mode: str, last: bool, padding: int | None) -> None:
    kind = "sum" if mode == "weighted" else mode
    layer = nn.EmbeddingBag(4, 3, mode=kind, include_last_offset=last, padding_idx=padding).double()
    weights = torch.rand(len(IDS), dtype=torch.float64) if mode == "weighted" else None
    offsets = torch.cat([OFFSETS, torch.tensor([len(IDS)])]) if last else OFFSETS
    backprops = torch.randn(4, 3, dtype=torch.float64)
    given = (IDS, offsets) if weights is None else (IDS, offsets, weights)
    assert layer(*given).shape == backprops.shape

    want = bag_gradients(
        nn.EmbeddingBag(4, 3, mode=kind, padding_idx=padding).double(), backprops, weights
    )
    rule, spec = rule_for(layer), spec_of("", layer)
    assert relative_error(rule.per_sample_grad(spec, given, backprops)["weight"], want) <= 1e-10
    assert relative_error(rule.norm_sq(spec, given, backprops)["weight"], norm_sq(want)) <= 1e-10
    factors = torch.rand(4, dtype=torch.float64)
    total = rule.weighted_grad(spec, given, backprops, factors)["weight"]
    assert relative_error(total, weighted_sum({"w": want}, factors)["w"]) <= 1e-10


def test_bags_that_are_not_the_samples_are_named() -> None:
    layer = nn.EmbeddingBag(4, 3)
    with pytest.raises(ValueError, match=r"bag.*EmbeddingBag.*\[7\], \[4\].*\[5, 3\]"):
        rule_for(layer).norm_sq(spec_of("bag", layer), (IDS, OFFSETS), torch.randn(5, 3))


def test_only_bags_of_equal_size_go_by_rows() -> None:
    rule = rule_for(nn.EmbeddingBag(6, 3))
    offsets = torch.tensor([0, 1, 1])
    assert rule.by_rows((torch.zeros(3, 4, dtype=torch.long),), 3)
    assert not rule.by_rows((torch.zeros(3, dtype=torch.long), offsets), 3)
