"""Questions about modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.utils.module_utils import (
    are_state_dict_equal,
    clone_module,
    get_submodule,
    has_trainable_params,
    parametrized_modules,
    requires_grad,
    trainable_modules,
    trainable_parameters,
)


@pytest.fixture
def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(3, 1, bias=False), nn.ReLU())
    model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), inner, nn.LayerNorm(1))
    model[2].bias.requires_grad_(False)
    return model


def test_walks(model: nn.Sequential) -> None:
    assert [n for n, _ in parametrized_modules(model)] == ["0", "1.0", "2"]
    assert [n for n, _ in trainable_modules(model)] == ["1.0", "2"]
    assert [n for n, _ in trainable_parameters(model)] == ["1.0.weight", "2.weight"]
    assert all(m is model.get_submodule(n) for n, m in parametrized_modules(model))


def test_trainable(model: nn.Sequential) -> None:
    assert [has_trainable_params(m) for m in model] == [False, False, True]
    assert [requires_grad(m) for m in model] == [False, False, True]
    assert [requires_grad(m, recurse=True) for m in model] == [False, True, True]
    assert not requires_grad(nn.ReLU(), recurse=True)


def test_submodules(model: nn.Sequential) -> None:
    assert get_submodule(model, "") is model
    assert get_submodule(model, "1.0") is model[1][0]
    with pytest.raises(AttributeError):
        get_submodule(model, "1.x")


def test_clones_are_independent_and_keep_ties(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 1, bias=False))
    model[3].weight = model[1][0].weight
    clone = clone_module(model)
    assert clone[3].weight is clone[1][0].weight
    assert [p.requires_grad for p in clone.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    clone[1][0].weight.data.zero_()
    assert model[1][0].weight.abs().sum() > 0


def test_modules_that_deepcopy_refuses_are_cloned() -> None:
    layer = nn.Linear(2, 2)
    layer.kept = layer.weight * 2  # has a graph
    clone = clone_module(layer)
    assert torch.equal(clone.weight, layer.weight) and clone.weight is not layer.weight


def test_state_dict_comparison() -> None:
    state = {"w": torch.ones(2), "b": torch.zeros(1)}
    assert are_state_dict_equal(state, {"b": torch.zeros(1), "w": torch.ones(2) + 1e-7})
    for other in (
        {"w": torch.ones(2)},
        {"w": torch.ones(2), "c": torch.zeros(1)},
        {"w": torch.ones(2) + 1e-2, "b": torch.zeros(1)},
        {"w": torch.ones(3), "b": torch.zeros(1)},
        {"w": torch.ones(2).double(), "b": torch.zeros(1)},
    ):
        assert not are_state_dict_equal(state, other)
