"""State dicts of recurrent layers are torch's, and renamed parameters stay one parameter."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from opacus.layers import DPGRU, DPLSTM, DPRNN, RenameParamsMixin
from opacus.layers.param_rename import filter_out_old_keys

PAIRS = [(nn.LSTM, DPLSTM), (nn.GRU, DPGRU), (nn.RNN, DPRNN)]


class Renamed(RenameParamsMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 1)
        self.set_rename_map({"a.weight": "wa", "absent.weight": "never"})

    def forward(self, x):
        return self.b(self.a(x))


def is_shared(module: RenameParamsMixin) -> bool:
    own = dict(module.named_parameters(remove_duplicate=False))
    return all(own[new] is own[old] for new, old in module.new_to_old.items() if new in own)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 2}]
)
def test_state_dicts_interchange_both_ways(theirs, ours, options: dict) -> None:
    if "proj_size" in options and theirs is not nn.LSTM:
        pytest.skip("only LSTMs have projections")
    reference, module = theirs(3, 4, **options), ours(3, 4, **options)
    assert {k: v.shape for k, v in module.state_dict().items()} == {
        k: v.shape for k, v in reference.state_dict().items()
    }
    assert module.load_state_dict(reference.state_dict()).missing_keys == []
    for name, value in reference.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    fresh = theirs(3, 4, **options)
    fresh.load_state_dict(module.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_inside_a_model_too(theirs, ours) -> None:
    reference, model = nn.Sequential(theirs(3, 4)), nn.Sequential(ours(3, 4))
    assert set(model.state_dict()) == set(reference.state_dict())
    assert {n for n, _ in model.named_parameters()} == set(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    assert torch.equal(model[0].l0.hh.weight, reference[0].weight_hh_l0)


def test_checkpoints_with_old_names_load() -> None:
    # Opacus writes both names when the layer is part of a model.
    model, weight = nn.Sequential(DPGRU(3, 4)), torch.randn(12, 4)
    state = model.state_dict()
    for extra in ({"0.l0.hh.weight": weight, "0.weight_hh_l0": weight}, {"0.l0.hh.weight": weight}):
        state.pop("0.weight_hh_l0", None)
        result = model.load_state_dict({**state, **extra})
        assert not result.missing_keys and not result.unexpected_keys
        assert torch.equal(model[0].weight_hh_l0, weight)


def test_missing_and_unexpected_keys_go_by_the_new_name() -> None:
    module = DPLSTM(3, 4)
    state = module.state_dict()
    del state["weight_hh_l0"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight_hh_l0"\. $'):
        module.load_state_dict(state)
    result = nn.Sequential(module).load_state_dict({"0.other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["0.other"]
    assert set(result.missing_keys) == {f"0.{name}" for name in module.state_dict()}


def test_other_parameters_keep_their_names() -> None:
    module = Renamed()
    assert [n for n, _ in module.named_parameters()] == ["wa", "a.bias", "b.weight", "b.bias"]
    assert list(module.state_dict()) == ["wa", "a.bias", "b.weight", "b.bias"]
    assert module.new_to_old["wa"] == "a.weight" and module.old_to_new["a.weight"] == "wa"
    with pytest.raises(ValueError, match="one name"):
        module.set_rename_map({"a.weight": "w", "b.weight": "w"})


def test_filter_leaves_its_argument_alone() -> None:
    state = {"p.wa": 1, "p.a.weight": 2, "a.weight": 3}
    assert filter_out_old_keys(Renamed(), state, "p.", {}) == {"p.wa": 1, "a.weight": 3}
    assert len(state) == 3


def test_parameters_without_recursion_belong_to_the_submodules() -> None:
    module = DPLSTM(3, 4)
    assert list(module.parameters(recurse=False)) == []
    assert len(list(module.parameters())) == 4
    assert len(list(module.l0.hh.parameters(recurse=False))) == 2


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: m.to("meta").to_empty(device="cpu"),
    ],
    ids=["deepcopy", "pickle", "double", "meta", "to_empty"],
)
def test_parameters_stay_shared_through(change) -> None:
    module = change(DPLSTM(3, 4, num_layers=2))
    assert is_shared(module)
    assert len(list(module.parameters())) == 8


def test_parameters_stay_shared_when_assigned() -> None:
    module, source = DPLSTM(3, 4), nn.LSTM(3, 4)
    module.load_state_dict(source.state_dict(), assign=True)
    assert is_shared(module) and torch.equal(module.l0.ih.weight, source.weight_ih_l0)
    model = nn.Sequential(DPLSTM(3, 4))
    model.load_state_dict(nn.Sequential(source).state_dict(), assign=True)
    assert is_shared(model[0])
    module.weight_ih_l0 = nn.Parameter(torch.zeros(16, 3))
    assert module.l0.ih.weight is module.weight_ih_l0


def test_functional_call_by_the_new_name() -> None:
    model, x = nn.Sequential(DPRNN(3, 4)), torch.randn(2, 5, 3)
    before = model(x)[0]
    changed = functional_call(model, {"0.weight_hh_l0": torch.zeros(4, 4)}, x)[0]
    assert torch.equal(changed[0], before[0]) and not torch.equal(changed[1:], before[1:])


def test_a_cell_changed_by_itself_is_refused() -> None:
    module = DPLSTM(3, 4)
    module.l0.ih.weight = nn.Parameter(torch.zeros(16, 3))
    with pytest.raises(RuntimeError, match=r"DPLSTM.weight_ih_l0 .* 'l0.ih.weight'"):
        module(torch.randn(2, 5, 3))
