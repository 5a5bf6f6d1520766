"""Parameters and modules that are shared in a model are shared in the fixed one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.layers import DPMultiheadAttention
from opacus.validators import ModuleValidator


def test_a_shared_module_is_replaced_once() -> None:
    norm, block = nn.BatchNorm1d(4), nn.Sequential(nn.LSTM(4, 4))
    fixed = ModuleValidator.fix(nn.ModuleList([norm, nn.Sequential(norm), block, block]))
    assert type(fixed[0]) is nn.GroupNorm and fixed[0] is fixed[1][0]
    assert fixed[2] is fixed[3]


def test_recurrent_weight_tied_to_another_recurrent_layer() -> None:
    model = nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)])
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    fixed = ModuleValidator.fix(model)
    assert fixed[0].weight_hh_l0 is fixed[1].weight_hh_l0
    assert fixed[0].l0.hh.weight is fixed[1].l0.hh.weight is fixed[0].weight_hh_l0
    assert fixed[0].weight_ih_l0 is not fixed[1].weight_ih_l0
    assert len(list(fixed.parameters())) == len(list(model.parameters())) == 7
    assert torch.equal(fixed[0].weight_hh_l0, model[0].weight_hh_l0)


def test_layers_tied_within_one_module() -> None:
    model = nn.GRU(4, 4, num_layers=2)
    model.weight_hh_l1 = model.weight_hh_l0
    fixed = ModuleValidator.fix(model)
    assert fixed.l1.hh.weight is fixed.l0.hh.weight is fixed.weight_hh_l1


def test_recurrent_weight_tied_to_a_module_that_stays() -> None:
    model = nn.ModuleList([nn.RNN(4, 4), nn.Linear(4, 4)])
    model[0].weight_hh_l0 = model[1].weight
    fixed = ModuleValidator.fix(model)
    assert fixed[0].weight_hh_l0 is fixed[1].weight is fixed[0].l0.hh.weight


def test_attention_layers_that_share_all_parameters() -> None:
    first, second = (nn.MultiheadAttention(4, 2, add_bias_kv=True) for _ in range(2))
    for name in ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"):
        setattr(second, name, getattr(first, name))
    second.out_proj.weight = first.out_proj.weight
    fixed = ModuleValidator.fix(nn.ModuleList([first, second]))
    assert all(type(m) is DPMultiheadAttention for m in fixed)
    own, other = (dict(m.named_parameters()) for m in fixed)
    assert {n for n in own if own[n] is not other[n]} == {"out_proj.bias"}


def test_embedding_tied_to_the_head_of_a_model_with_replaced_layers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(7, 4)
            self.rnn = nn.GRU(4, 4)
            self.head = nn.Linear(4, 7)
            self.head.weight = self.tokens.weight

    fixed = ModuleValidator.fix(Model())
    assert fixed.head.weight is fixed.tokens.weight


def test_norms_of_one_weight() -> None:
    first, second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    second.weight = first.weight
    fixed = ModuleValidator.fix(nn.ModuleList([first, second]))
    assert fixed[0].weight is fixed[1].weight and fixed[0].bias is not fixed[1].bias
    without = ModuleValidator.fix(nn.ModuleList([first, second]), replace_bn_with_in=True)
    assert list(without.parameters()) == []


def test_a_tie_that_cannot_be_kept_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": nn.Linear(4, 12)})
    model["b"].weight = model["a"].in_proj_weight
    with pytest.raises(ValueError, match=r"'b.weight' and 'a.in_proj_weight' are one parameter"):
        ModuleValidator.fix(model)
