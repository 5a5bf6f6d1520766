"""What fix() puts in the place of modules, and what it leaves as it is."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict

import pytest
import torch
from torch import nn

from opacus.grad_sample import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.utils.module_utils import are_state_dict_equal
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportableModuleError, UnsupportedModuleError

RECURRENT = [
    (nn.LSTM, DPLSTM, {}),
    (nn.LSTM, DPLSTM, {"proj_size": 2}),
    (nn.GRU, DPGRU, {}),
    (nn.RNN, DPRNN, {}),
    (nn.RNN, DPRNN, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("theirs", "ours", "options"), RECURRENT)
def test_recurrent_modules_keep_their_function(theirs, ours, options: dict) -> None:
    settings = {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}
    model = nn.Sequential(theirs(4, 3, dropout=0.1, **settings, **options)).double().eval()
    fixed = ModuleValidator.fix(model)
    assert type(fixed[0]) is ours and fixed[0].dropout == 0.1
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(fixed(x), model(x), rtol=1e-10, atol=1e-10)
    assert are_state_dict_equal(fixed.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bias": False, "add_zero_attn": True},
        {"kdim": 3, "vdim": 5, "add_bias_kv": True},
    ],
)
def test_attention_keeps_its_function(options: dict) -> None:
    module = nn.MultiheadAttention(4, 2, dropout=0.2, dtype=torch.float64, **options).eval()
    fixed = ModuleValidator.fix(module)
    assert type(fixed) is DPMultiheadAttention and fixed.dropout.p == 0.2
    x = [torch.randn(3, 3, w, dtype=torch.float64) for w in (4, module.kdim, module.vdim)]
    torch.testing.assert_close(fixed(*x), module(*x), rtol=1e-10, atol=1e-10)
    assert are_state_dict_equal(fixed.state_dict(), module.state_dict())


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (3, 1), (4, 4), (16, 16), (20, 4), (32, 32), (33, 1), (48, 16), (64, 32), (100, 4)],
)
def test_default_number_of_groups(channels: int, groups: int) -> None:
    for norm in (nn.BatchNorm2d, nn.BatchNorm3d):
        fixed = ModuleValidator.fix(norm(channels, eps=1e-3))
        assert type(fixed) is nn.GroupNorm
        assert (fixed.num_groups, fixed.num_channels, fixed.eps) == (groups, channels, 1e-3)


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(2, 1), (3, 1), (4, 2), (16, 8), (20, 4), (32, 16), (33, 1), (48, 16), (64, 32), (100, 4)],
)
def test_groups_where_a_channel_may_be_one_value(channels: int, groups: int) -> None:
    for norm in (nn.BatchNorm1d, nn.SyncBatchNorm):
        fixed = ModuleValidator.fix(norm(channels, eps=1e-3))
        assert (fixed.num_groups, fixed.num_channels, fixed.eps) == (groups, channels, 1e-3)
        assert fixed(torch.randn(8, channels)).abs().amax() > 0.5  # nothing is erased
    assert ModuleValidator.fix(nn.BatchNorm1d(channels), num_groups=channels).num_groups == channels


def test_a_single_channel_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"BatchNorm1d\(1, .* zeros"):
        assert ModuleValidator.fix(nn.BatchNorm1d(1)).num_groups == 1


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm_instead(dims: int) -> None:
    norm = getattr(nn, f"BatchNorm{dims}d")(6, eps=1e-3)
    fixed = ModuleValidator.fix(nn.Sequential(norm), replace_bn_with_in=True)[0]
    assert type(fixed) is getattr(nn, f"InstanceNorm{dims}d")
    assert fixed.num_features == 6 and fixed.eps == 1e-3 and not fixed.track_running_stats


def test_options() -> None:
    model = nn.Sequential(OrderedDict(fc=nn.Linear(4, 8), rnn=nn.LSTM(8, 8), bn=nn.BatchNorm2d(16)))
    assert ModuleValidator.fix(model, num_groups=4).bn.num_groups == 4
    with pytest.raises(ValueError, match="num_groups=3 must divide the 16 channels"):
        ModuleValidator.fix(model, num_groups=3)
    with pytest.raises(ValueError, match="num_groups=4 has no meaning"):
        ModuleValidator.fix(model, num_groups=4, replace_bn_with_in=True)
    with pytest.raises(TypeError, match="'num_group'"):
        ModuleValidator.fix(nn.Linear(2, 2), num_group=4)
    with pytest.raises(TypeError, match="num_group"):
        ModuleValidator.FIXERS[nn.BatchNorm2d](model.bn, num_group=4)
    with pytest.raises(UnsupportableModuleError, match="SyncBatchNorm"):
        ModuleValidator.fix(nn.SyncBatchNorm(4), replace_bn_with_in=True)


def test_instance_norm_loses_its_statistics_only() -> None:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 4, 3, 3)
    want = nn.functional.instance_norm(x, weight=norm.weight, bias=norm.bias)
    fixed = ModuleValidator.fix(nn.Sequential(norm))
    assert set(fixed.state_dict()) == {"0.weight", "0.bias"}
    for mode in (True, False):
        torch.testing.assert_close(fixed.train(mode)(x), want)
    untouched = nn.InstanceNorm2d(4, affine=True)
    assert ModuleValidator.FIXERS[nn.InstanceNorm2d](untouched) is untouched


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.rnn = nn.RNN(4, 4)
        self.lstm = nn.LSTM(4, 4)
        self.gru = nn.GRU(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.instance(self.norm(self.conv(x))).flatten(2).permute(2, 0, 1)
        for layer in (self.rnn, self.lstm, self.gru):
            x = layer(x)[0]
        return self.head(self.attention(x, x, x)[0].mean(0))


def test_the_given_model_stays_as_it_is() -> None:
    model = Model()
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    parameters = {id(p) for p in model.parameters()}
    fixed = ModuleValidator.fix(model)
    assert not parameters & {id(p) for p in fixed.parameters()}
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in fixed.parameters()}
    assert [type(m) for m in model.modules()] == kinds
    assert are_state_dict_equal(model.state_dict(), before)


def test_single_fixers_copy_too() -> None:
    for module in (nn.LSTM(4, 3), nn.MultiheadAttention(4, 2)):
        fixed = ModuleValidator.FIXERS[type(module)](module)
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        assert not storages & {p.untyped_storage().data_ptr() for p in fixed.parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("training", [False, True])
def test_device_dtype_and_mode_are_kept(dtype: torch.dtype, device: str, training: bool) -> None:
    model = Model().to(device=device, dtype=dtype).train(training)
    fixed = ModuleValidator.fix(model)
    assert {(p.device.type, p.dtype) for p in fixed.parameters()} == {(device, dtype)}
    assert all(m.training is training for m in fixed.modules())


def test_frozen_parameters_stay_frozen() -> None:
    model = Model()
    for name in ("norm.bias", "lstm.weight_hh_l0", "attention.in_proj_weight", "attention.bias_k"):
        model.get_parameter(name).requires_grad_(False)
    fixed = ModuleValidator.fix(model)
    frozen = {n for n, p in fixed.named_parameters() if not p.requires_grad}
    assert frozen == {
        "norm.bias",
        "lstm.weight_hh_l0",
        "attention.seq_bias_k.bias",
        *(f"attention.{x}linear.weight" for x in "qkv"),
    }


def test_frozen_modules_are_not_replaced() -> None:
    model = nn.Sequential(nn.LSTM(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    assert [type(m) for m in ModuleValidator.fix(model)] == [nn.LSTM, nn.BatchNorm1d]


def test_norms_over_the_batch_without_parameters_are_replaced() -> None:
    for norm in (
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm2d(4, affine=False, track_running_stats=False),
        nn.BatchNorm2d(4, track_running_stats=False).requires_grad_(False),
    ):
        fixed = ModuleValidator.fix_and_validate(nn.Sequential(nn.Linear(4, 4), norm))
        assert type(fixed[1]) is nn.GroupNorm and fixed[1].affine == norm.affine
        assert not any(p.requires_grad for p in fixed[1].parameters())


def test_fixed_models_train() -> None:
    model = ModuleValidator.fix_and_validate(Model())
    private = GradSampleModule(model)
    private(torch.randn(3, 2, 5, 5)).sum().backward()
    assert all(p.grad_sample.shape == (3, *p.shape) for p in model.parameters())


def test_in_place_activation_after_a_replaced_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 2)
    )
    fixed = ModuleValidator.fix_and_validate(model)
    x = torch.randn(3, 2, 5, 5)
    private = GradSampleModule(copy.deepcopy(fixed), loss_reduction="sum")
    private(x).square().sum().backward()
    for i in range(3):
        fixed.zero_grad()
        fixed(x[i : i + 1]).square().sum().backward()
        for a, b in zip(private.parameters(), fixed.parameters(), strict=True):
            torch.testing.assert_close(a.grad_sample[i], b.grad)


def test_fix_and_validate_raises_what_is_left() -> None:
    with pytest.raises(UnsupportedModuleError, match="training mode"):
        ModuleValidator.fix_and_validate(nn.Sequential(nn.LSTM(4, 3)).eval())


def test_replacements_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="opacus"):
        ModuleValidator.fix(nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 3)))
    (record,) = caplog.records
    assert "'1'" in record.getMessage() and "DPGRU" in record.getMessage()
