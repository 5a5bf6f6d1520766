"""What is found wrong with models, and how it is said."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from opacus.grad_sample import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.validators import (
    ModuleValidator,
    register_module_fixer,
    register_module_validator,
)
from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    NotYetSupportedModuleError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedError,
    UnsupportedModuleError,
)

REPLACEABLE = {
    "bn1": lambda: nn.BatchNorm1d(4),
    "bn2": lambda: nn.BatchNorm2d(4),
    "bn3": lambda: nn.BatchNorm3d(4),
    "sync": lambda: nn.SyncBatchNorm(4),
    "lazy": lambda: nn.LazyBatchNorm2d(),
    "lstm": lambda: nn.LSTM(4, 3),
    "gru": lambda: nn.GRU(4, 3),
    "rnn": lambda: nn.RNN(4, 3),
    "attention": lambda: nn.MultiheadAttention(4, 2),
}
FINE = {
    "linear": lambda: nn.Linear(4, 3),
    "group": lambda: nn.GroupNorm(2, 4),
    "layer": lambda: nn.LayerNorm(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "bilinear": lambda: nn.Bilinear(2, 2, 2),
    "lstm": lambda: DPLSTM(4, 3),
    "gru": lambda: DPGRU(4, 3),
    "rnn": lambda: DPRNN(4, 3),
    "attention": lambda: DPMultiheadAttention(4, 2),
    "frozen_lstm": lambda: nn.LSTM(4, 3).requires_grad_(False),
    "frozen_attention": lambda: nn.MultiheadAttention(4, 2).requires_grad_(False),
    "frozen_bn_in_eval_mode": lambda: nn.BatchNorm2d(4).requires_grad_(False).eval(),
    "frozen_in_in_eval_mode": lambda: nn.InstanceNorm2d(4, track_running_stats=True).eval(),
}


class Outer(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), module)])


@pytest.mark.parametrize("kind", REPLACEABLE)
def test_replaceable_modules_are_named(kind: str) -> None:
    model = Outer(REPLACEABLE[kind]())
    (error,) = ModuleValidator.validate(model)
    assert type(error) is ShouldReplaceModuleError
    assert str(error).startswith(f"'blocks.0.1' ({type(model.blocks[0][1]).__name__}): ")
    assert "ModuleValidator.fix()" in str(error)
    assert not ModuleValidator.is_valid(model)


@pytest.mark.parametrize("kind", FINE)
def test_fine_modules_pass(kind: str) -> None:
    assert ModuleValidator.validate(Outer(FINE[kind]()), strict=True) == []
    assert ModuleValidator.is_valid(Outer(FINE[kind]()))


def test_the_model_itself_is_checked() -> None:
    (error,) = ModuleValidator.validate(nn.GRU(4, 3))
    assert str(error).startswith("the model itself (GRU)")


def test_all_errors_are_raised_together() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LSTM(4, 3)).eval()
    with pytest.raises(UnsupportedModuleError) as caught:
        ModuleValidator.validate(model, strict=True)
    errors = caught.value.errors
    kinds = [IllegalModuleConfigurationError, ShouldReplaceModuleError, ShouldReplaceModuleError]
    assert [type(e) for e in errors] == kinds
    assert isinstance(caught.value, ValueError)
    for part in ("training mode", "'0' (BatchNorm1d)", "'2' (LSTM)"):
        assert part in str(caught.value)


def test_training_mode_is_needed() -> None:
    model = nn.Linear(2, 2).eval()
    (error,) = ModuleValidator.validate(model)
    assert type(error) is IllegalModuleConfigurationError
    assert ModuleValidator.is_valid(model.train())


@pytest.mark.parametrize("affine", [False, True])
def test_running_statistics_are_refused(affine: bool) -> None:
    # Without parameters too: the statistics are stored in the model.
    model = Outer(nn.InstanceNorm2d(4, affine=affine, track_running_stats=True))
    (error,) = ModuleValidator.validate(model)
    assert type(error) is IllegalModuleConfigurationError and "'blocks.0.1'" in str(error)
    assert ModuleValidator.is_valid(ModuleValidator.fix(model))


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(4, affine=False),
        lambda: nn.BatchNorm2d(4).requires_grad_(False),
        lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False).eval(),
        lambda: nn.BatchNorm1d(4, track_running_stats=False).requires_grad_(False).eval(),
        lambda: nn.SyncBatchNorm(4, affine=False),
        lambda: nn.LazyBatchNorm3d(affine=False),
    ],
)
def test_norms_over_the_batch_are_refused_without_trainable_parameters(norm) -> None:
    model = Outer(norm())
    name = type(model.blocks[0][1]).__name__
    (error,) = ModuleValidator.validate(model)
    assert type(error) is ShouldReplaceModuleError
    assert str(error).startswith(f"'blocks.0.1' ({name}): ")
    with pytest.raises(NotImplementedError, match=r"blocks\.0\.1: " + name):
        GradSampleModule.validate(model, strict=True)


@pytest.mark.parametrize("trained", [False, True])
def test_a_frozen_norm_is_told_to_be_put_in_eval_mode(trained: bool) -> None:
    model = Outer(nn.BatchNorm2d(4).requires_grad_(trained))
    (error,) = ModuleValidator.validate(model)
    assert ("eval mode" in str(error)) != trained
    model.blocks[0][1].eval()
    assert ModuleValidator.is_valid(model) != trained
    assert bool(GradSampleModule.validate(model)) == trained


def test_partly_frozen_modules_are_refused() -> None:
    attention = nn.MultiheadAttention(4, 2)
    attention.requires_grad_(False)
    attention.out_proj.weight.requires_grad_(True)  # used, but its layer is never called
    assert len(ModuleValidator.validate(Outer(attention))) == 1
    norm = nn.BatchNorm2d(4)
    norm.weight.requires_grad_(False)
    assert len(ModuleValidator.validate(Outer(norm))) == 1


def test_subclasses_are_refused() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, input):
            return torch.relu(super().forward(input))

    class Plain(nn.LSTM):
        pass

    assert len(ModuleValidator.validate(Outer(Activated(4)))) == 1
    assert len(ModuleValidator.validate(Outer(Plain(4, 3)))) == 1
    # Only those that compute what their base does can be replaced.
    kept = ModuleValidator.fix(Outer(Activated(4)))
    assert type(kept.blocks[0][1]) is Activated
    assert type(ModuleValidator.fix(Outer(Plain(4, 3))).blocks[0][1]) is DPLSTM
    with pytest.raises(UnsupportedModuleError, match="Activated"):
        ModuleValidator.fix_and_validate(Outer(Activated(4)))


def test_parametrized_modules_are_not_replaced() -> None:
    model = nn.Sequential(spectral_norm(nn.LSTM(4, 3), "weight_hh_l0"))
    assert len(ModuleValidator.validate(model)) == 1
    assert isinstance(ModuleValidator.fix(model)[0], nn.LSTM)


def test_uninitialised_modules_are_refused_by_fix() -> None:
    with pytest.raises(ValueError, match=r"'blocks.0.1.weight', .* run the model once"):
        ModuleValidator.fix(Outer(nn.LazyBatchNorm2d()))
    with pytest.raises(ValueError, match=r"'blocks.0.1'.* run the model once"):
        ModuleValidator.fix(Outer(nn.LazyBatchNorm2d(affine=False)))


def test_registering_validators_and_fixers() -> None:
    class Own(nn.Linear):
        pass

    class Other(ModuleValidator):
        VALIDATORS: ClassVar[dict] = {}
        FIXERS: ClassVar[dict] = {}

    @register_module_validator(Own, Other)
    def validate(module):
        return [NotYetSupportedModuleError("not yet", 7)]

    @register_module_fixer([Own, nn.Bilinear], Other)
    def fix(module, **kwargs):
        return nn.Linear(module.in_features, kwargs["width"])

    assert Own not in ModuleValidator.VALIDATORS and Own not in ModuleValidator.FIXERS
    assert dict.fromkeys([Own, nn.Bilinear], fix) == Other.FIXERS
    assert dict.fromkeys([Own], validate) == Other.VALIDATORS
    (error,) = Other.validate(nn.Sequential(Own(2, 3)))
    assert error.args == ("'0' (Own): not yet", 7)
    assert Other.is_valid(nn.Sequential(nn.LSTM(2, 3)))
    assert Other.fix(nn.Sequential(Own(2, 3)), width=5)[0].out_features == 5


def test_errors_are_one_family() -> None:
    for kind in (
        ShouldReplaceModuleError,
        UnsupportableModuleError,
        NotYetSupportedModuleError,
        IllegalModuleConfigurationError,
    ):
        assert issubclass(kind, UnsupportedModuleError) and issubclass(kind, UnsupportedError)
        assert str(kind("reason")) == "reason" and kind("reason").errors[0].args == ("reason",)
