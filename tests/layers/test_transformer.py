"""torch's transformer layers compute the same after their attention has been replaced."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from opacus.layers import DPMultiheadAttention
from opacus.validators import ModuleValidator

E, H, B, T, S = 8, 2, 3, 5, 7
OPTIONS = {"d_model": E, "nhead": H, "dim_feedforward": 12, "dropout": 0.0}


def fixed(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    model = model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    replaced = ModuleValidator.fix(model)
    assert any(isinstance(m, DPMultiheadAttention) for m in replaced.modules())
    assert ModuleValidator.is_valid(replaced)
    return model, replaced


def sequence(length: int, batch_first: bool) -> Tensor:
    shape = (B, length, E) if batch_first else (length, B, E)
    return torch.randn(shape, dtype=torch.float64)


def padding() -> Tensor:
    lengths = torch.tensor([5, 3, 4])
    return torch.arange(T) >= lengths.unsqueeze(1)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_encoder_layer(batch_first: bool, training: bool, grad: bool) -> None:
    for norm_first, bias in itertools.product((False, True), repeat=2):
        layer = nn.TransformerEncoderLayer(
            **OPTIONS, batch_first=batch_first, norm_first=norm_first, bias=bias
        )
        pair = [m.train(training) for m in fixed(layer)]
        x = sequence(T, batch_first)
        causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
        for options in (
            {},
            {"src_key_padding_mask": padding()},
            {"src_mask": causal},
            {"src_mask": causal, "is_causal": True},
        ):
            with torch.set_grad_enabled(grad):
                want, got = (m(x, **options) for m in pair)
            rows = ~padding() if "src_key_padding_mask" in options else slice(None)
            if batch_first is False and "src_key_padding_mask" in options:
                want, got = want.transpose(0, 1), got.transpose(0, 1)
            torch.testing.assert_close(got[rows], want[rows], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch_first", [False, True])
def test_decoder_layer(batch_first: bool) -> None:
    pair = fixed(nn.TransformerDecoderLayer(**OPTIONS, batch_first=batch_first))
    target, memory = sequence(T, batch_first), sequence(S, batch_first)
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for training, options in itertools.product(
        (False, True),
        ({}, {"tgt_mask": causal, "tgt_is_causal": True}, {"tgt_key_padding_mask": padding()}),
    ):
        want, got = (m.train(training)(target, memory, **options) for m in pair)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_parameter_gradients_of_an_encoder_layer() -> None:
    reference, module = fixed(nn.TransformerEncoderLayer(**OPTIONS, batch_first=True))
    x = sequence(T, True)
    for m in (reference, module):
        m(x).square().sum().backward()
    for name, parameter in reference.named_parameters():
        if "self_attn.in_proj" not in name:
            got = module.get_parameter(name).grad
            torch.testing.assert_close(got, parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage.*:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_encoder_with_padding(grad: bool, training: bool) -> None:
    # Without gradients torch's encoder turns padded batches into nested tensors.
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**OPTIONS, batch_first=True), 2)
    assert encoder.use_nested_tensor
    pair = [m.train(training) for m in fixed(encoder)]
    x = sequence(T, True)
    with torch.set_grad_enabled(grad):
        want, got = (m(x, src_key_padding_mask=padding())[~padding()] for m in pair)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_encoder_can_be_built_of_replaced_layers() -> None:
    layer = ModuleValidator.fix(nn.TransformerEncoderLayer(**OPTIONS, batch_first=True))
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        output = encoder(torch.randn(B, T, E), src_key_padding_mask=padding())
    assert output.shape == (B, T, E)


def test_whole_transformer() -> None:
    model = nn.Transformer(E, H, 1, 1, 12, dropout=0.0, batch_first=True)
    reference, module = fixed(model)
    assert sum(isinstance(m, DPMultiheadAttention) for m in module.modules()) == 3
    source, target = sequence(S, True), sequence(T, True)
    for training in (False, True):
        want, got = (m.train(training)(source, target) for m in (reference, module))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    clone = copy.deepcopy(module)
    torch.testing.assert_close(clone(source, target), got)
