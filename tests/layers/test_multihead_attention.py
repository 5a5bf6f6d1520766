"""DPMultiheadAttention computes what nn.MultiheadAttention does, in every setting."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from opacus.layers import DPMultiheadAttention, SequenceBias, torch_state_dict

E, H, B, T, S = 8, 2, 3, 5, 7
WIDTHS = [{}, {"kdim": 3, "vdim": 5}, {"kdim": 8, "vdim": 8}]
SETTINGS = [
    {"bias": bias, "add_bias_kv": kv, "add_zero_attn": zero, **width}
    for bias, kv, zero, width in itertools.product((True, False), (False, True), (False, True), WIDTHS)
]  # fmt: skip


def pair(**options) -> tuple[nn.MultiheadAttention, DPMultiheadAttention]:
    """torch's module and ours with the same weights, in float64."""
    reference = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    module = DPMultiheadAttention(E, H, dtype=torch.float64, **options)
    for name, parameter in reference.named_parameters():
        if "bias" in name:  # torch starts with zeros
            nn.init.normal_(parameter)
    module.load_state_dict(reference.state_dict())
    return reference, module


def sequences(module: DPMultiheadAttention, layout: str, keys: int) -> list[Tensor]:
    def make(length: int, width: int) -> Tensor:
        shape = {"time": (length, B), "batch": (B, length), "single": (length,)}[layout]
        return torch.randn(*shape, width, dtype=torch.float64, requires_grad=True)

    return [make(T, E), make(keys, module.kdim), make(keys, module.vdim)]


def attention_mask(kind: str, rows: int) -> Tensor | None:
    if kind == "causal":
        return torch.ones(T, T, dtype=torch.bool).triu(1)
    if kind == "none":
        return None
    shape = (T, S) if kind.endswith("2") else (rows * H, T, S)
    if kind.startswith("float"):
        return torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape) > 0.6
    mask[..., 0] = False
    return mask


def padding_mask(kind: str, rows: int, keys: int, batched: bool) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.rand(rows, keys) > 0.6
    mask[:, 0] = False
    mask = mask if kind == "bool" else torch.randn(rows, keys, dtype=torch.float64)
    return mask if batched else mask[0]


def results(module: nn.Module, inputs: list[Tensor], options: dict) -> list[Tensor]:
    output, weights = module(*inputs, **options)
    loss = (output**2).sum() + (0 if weights is None else (weights**3).sum())
    assert (weights is None) == (not options["need_weights"])
    gradients = torch.autograd.grad(loss, [*inputs, module.out_proj.weight])
    return [output, *gradients] if weights is None else [output, weights, *gradients]


def compare(reference: nn.Module, module: nn.Module, inputs: list[Tensor], options: dict) -> None:
    want, got = (results(m, inputs, options) for m in (reference, module))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["time", "batch", "single"])
@pytest.mark.parametrize("masks", ["none", "bool2", "float2", "bool3", "float3", "causal"])
def test_equals_torch(layout: str, masks: str) -> None:
    rows = 1 if layout == "single" else B
    for settings, padding, weights in itertools.product(
        SETTINGS, ("none", "bool", "float"), ("none", "mean", "each")
    ):
        if padding != "none" and not masks.startswith((padding, "none")):
            continue  # torch warns of masks of different kinds
        extra = settings["add_bias_kv"] or settings["add_zero_attn"]
        if masks == "causal" and weights == "none" and extra:
            continue  # torch's answer depends on whether weights are asked for
        reference, module = pair(batch_first=layout == "batch", **settings)
        keys = T if masks == "causal" else S
        options = {
            "attn_mask": attention_mask(masks, rows),
            "key_padding_mask": padding_mask(padding, rows, keys, layout != "single"),
            "need_weights": weights != "none",
            "average_attn_weights": weights != "each",
            "is_causal": masks == "causal",
        }
        compare(reference, module, sequences(module, layout, keys), options)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_self_attention_equals_torch(batch_first: bool, training: bool) -> None:
    reference, module = pair(batch_first=batch_first)
    x = torch.randn(B, T, E, dtype=torch.float64)
    for m in (reference, module):
        m.train(training)
    with torch.no_grad():
        for weights in (False, True):
            want, got = (m(x, x, x, need_weights=weights) for m in (reference, module))
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_all_parameter_gradients_equal_torchs() -> None:
    reference, module = pair(add_bias_kv=True)
    inputs = sequences(module, "time", S)
    for m in (reference, module):
        m(*inputs)[0].square().sum().backward()
    got = {n: p.grad for n, p in module.state_dict(keep_vars=True).items() if p.is_leaf}
    got["in_proj_weight"] = torch.cat([getattr(module, f"{x}linear").weight.grad for x in "qkv"])
    got["in_proj_bias"] = torch.cat([getattr(module, f"{x}linear").bias.grad for x in "qkv"])
    got["bias_k"] = module.seq_bias_k.bias.grad.view(1, 1, -1)
    got["bias_v"] = module.seq_bias_v.bias.grad.view(1, 1, -1)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_causal_hint_with_extra_keys_is_the_mask() -> None:
    _, module = pair(add_bias_kv=True)
    inputs = sequences(module, "time", T)
    mask = attention_mask("causal", B)
    with_hint = module(*inputs, attn_mask=mask, need_weights=False, is_causal=True)[0]
    torch.testing.assert_close(with_hint, module(*inputs, attn_mask=mask)[0])


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("weights", [False, True])
def test_half_precision_with_masks_of_any_dtype(mask_dtype: torch.dtype, weights: bool) -> None:
    _, module = pair()
    inputs = sequences(module, "time", S)
    mask = attention_mask("bool2", B)
    want = module(*inputs, attn_mask=mask)[0]
    half = copy.deepcopy(module).bfloat16()
    additive = torch.zeros(T, S).masked_fill(mask, -torch.inf)
    given = mask if mask_dtype is torch.bool else additive.to(mask_dtype)
    got = half(*(s.bfloat16() for s in inputs), attn_mask=given, need_weights=weights)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)


def test_empty_batch() -> None:
    _, module = pair(batch_first=True, add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(0, T, E, dtype=torch.float64)
    mask = torch.zeros(0, T, T, dtype=torch.bool)
    padding = torch.zeros(0, T, dtype=torch.bool)
    for weights in (False, True):
        output, _ = module(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=weights)
        assert output.shape == (0, T, E)
        output.sum().backward()


def test_dropout_of_weights_in_training() -> None:
    torch.manual_seed(0)
    module = DPMultiheadAttention(E, H, dropout=0.5)
    x = torch.randn(T, B, E)
    for weights in (False, True):
        module.train()
        assert not torch.equal(module(x, x, x, None, weights)[0], module(x, x, x, None, weights)[0])
        module.eval()
        assert torch.equal(module(x, x, x, None, weights)[0], module(x, x, x, None, weights)[0])
    shown = module.train()(x, x, x, average_attn_weights=False)[1]
    assert 0.3 < (shown == 0).float().mean() < 0.7


@pytest.mark.parametrize("settings", SETTINGS)
def test_state_dicts_interchange_both_ways(settings: dict) -> None:
    reference, module = pair(**settings)
    state = module.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name], value)
    fresh = nn.MultiheadAttention(E, H, dtype=torch.float64, **settings)
    fresh.load_state_dict(state)
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_state_dicts_of_models(settings: dict) -> None:
    reference, module = pair(**settings)
    model = nn.ModuleDict({"a": DPMultiheadAttention(E, H, dtype=torch.float64, **settings)})
    theirs = nn.ModuleDict({"a": reference, "b": nn.Linear(2, 2)})
    # Its own names, those of its parameters, as Opacus has them.
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters()}
    model["b"] = nn.Linear(2, 2)
    model.load_state_dict(theirs.state_dict())
    assert torch.equal(model["a"].qlinear.weight, module.qlinear.weight)
    own = model.state_dict()
    model.load_state_dict(own)
    exported = torch_state_dict(model)
    assert set(exported) == set(theirs.state_dict())
    theirs.load_state_dict(exported)
    assert set(model.state_dict()) == set(own)


def test_incomplete_state_dicts_are_refused() -> None:
    _, module = pair()
    state = module.state_dict()
    with pytest.raises(RuntimeError, match=r"klinear\.weight"):
        module.load_state_dict({k: v for k, v in state.items() if k != "in_proj_weight"})
    with pytest.raises(RuntimeError, match="other"):
        module.load_state_dict({**state, "other": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for qlinear\.weight"):
        module.load_state_dict({**state, "in_proj_weight": torch.ones(7, E)})


def test_state_dict_hooks_see_torchs_names() -> None:
    module = DPMultiheadAttention(E, H)

    def hook(module, state, prefix, metadata) -> None:
        del state["in_proj_bias"]

    module.register_state_dict_post_hook(hook)
    assert "in_proj_bias" not in module.state_dict()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="embed_dim=8, num_heads=3"):
        DPMultiheadAttention(8, 3)
    module, x = DPMultiheadAttention(E, H), torch.randn(T, B, E)
    with pytest.raises(ValueError, match="is_causal"):
        module(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(5, 5\) or \(6, 5, 5\)"):
        module(x, x, x, attn_mask=torch.zeros(T, S))
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(3, 5\)"):
        module(x, x, x, key_padding_mask=torch.zeros(T, B))
    with pytest.raises(TypeError, match="attn_mask"):
        module(x, x, x, attn_mask=torch.zeros(T, T, dtype=torch.long))
    with pytest.raises(ValueError, match="same length"):
        module(x, x, x[1:])
    with pytest.raises(ValueError, match="3 dimensions"):
        module(x, x[0], x[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_sequence_bias_is_one_more_step(batch_first: bool) -> None:
    layer, x = SequenceBias(E, batch_first), torch.randn(B, T, E)
    extended = layer(x) if batch_first else layer(x.transpose(0, 1)).transpose(0, 1)
    assert extended.shape == (B, T + 1, E)
    assert torch.equal(extended[:, :-1], x)
    assert torch.equal(extended[:, -1], layer.bias.expand(B, E))


def test_device_and_dtype() -> None:
    module = DPMultiheadAttention(E, H, add_bias_kv=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert module.unsqueeze_0_2(torch.ones(3, 4)).shape == (1, 1, 3, 4)
