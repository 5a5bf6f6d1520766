"""Models by name: sizes, what they compute, and errors that say what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memory_test.common import dp_transformer
from memory_test.common.dit import DiT, latent_size
from memory_test.common.dp_transformer import DPMultiheadAttentionWithFlashAttention
from memory_test.common.failures import UsageError
from memory_test.common.models import SHAPES, ModelRequest, _why_not_fetched, build_model
from memory_test.common.modes import HARNESS_MODES, available_modes, package_modes, resolve_mode
from memory_test.common.norm_cost import linear_layers
from opacus import GradSampleModule
from opacus.validators import ModuleValidator

CPU = torch.device("cpu")


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_that_of_torch(causal):
    torch.manual_seed(0)
    ours = DPMultiheadAttentionWithFlashAttention(24, 4, causal=causal)
    theirs = nn.MultiheadAttention(24, 4, batch_first=True)
    with torch.no_grad():
        parts = (ours.q_proj, ours.k_proj, ours.v_proj)
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x = torch.randn(3, 7, 24)
    mask = nn.Transformer.generate_square_subsequent_mask(7) if causal else None
    expected = theirs(x, x, x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(ours(x), expected)
    assert not ModuleValidator.validate(ours) and ModuleValidator.validate(theirs)


def test_attention_uses_flash_attn_where_it_can(monkeypatch):
    monkeypatch.setattr(
        dp_transformer, "flash_attention_function", lambda: lambda q, k, v, **_: q + k + v
    )
    layer = DPMultiheadAttentionWithFlashAttention(8, 2)
    assert not layer.uses_flash_attention(torch.ones(1))  # on the CPU torch's runs
    monkeypatch.setattr(layer, "uses_flash_attention", lambda q: True)
    x = torch.randn(2, 3, 8)
    summed = layer.q_proj(x) + layer.k_proj(x) + layer.v_proj(x)
    torch.testing.assert_close(layer(x), layer.out_proj(summed))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="embed_dim=10, num_heads=4"):
        DPMultiheadAttentionWithFlashAttention(10, 4)


def test_dit_xl_2_has_the_published_size():
    with torch.device("meta"):
        model = DiT(**SHAPES["dit-xl-2"].sizes, tokens=256)
    count = sum(p.numel() for p in model.parameters())
    assert 670e6 < count < 680e6  # 675M (arXiv:2212.09748, table 1)
    assert model.image_size == (32, 32)


@pytest.mark.parametrize("tokens, size", [(256, (32, 32)), (512, (32, 64)), (7, (2, 14))])
def test_images_of_any_number_of_tokens(tokens, size):
    assert latent_size(tokens) == size


def test_per_sample_gradients_of_the_diffusion_model():
    torch.manual_seed(0)
    model = build_model(ModelRequest("tiny-dit", "lm", 8), CPU)
    images, steps, labels = torch.randn(3, 4, 4, 8), torch.tensor([1, 500, 900]), torch.arange(3)
    targets = torch.randn_like(images)
    expected = []
    for i in range(3):
        model.zero_grad()
        nn.functional.mse_loss(
            model(images[i : i + 1], steps[i : i + 1], labels[i : i + 1]), targets[i : i + 1]
        ).backward()
        expected.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    private = GradSampleModule(model)
    nn.functional.mse_loss(private(images, steps, labels), targets).backward()
    for index, parameter in enumerate(private.parameters()):
        reference = torch.stack([grads[index] for grads in expected])
        torch.testing.assert_close(parameter.grad_sample, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["tiny", "tiny-dit"])
def test_checkpointing_changes_no_gradient(name):
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = build_model(ModelRequest(name, "lm", 8, checkpointing=checkpointing), CPU)
        torch.manual_seed(1)
        if name == "tiny":
            out = model(torch.arange(16).view(2, 8))
        else:
            out = model(torch.randn(2, 4, *model.image_size), torch.arange(2), torch.arange(2))
        out.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["no-such-model", "./nothing-here", "/nothing/here"])
def test_an_unknown_name_lists_the_shapes(name):
    with pytest.raises(UsageError, match=r"built-in shape \(tiny"):
        build_model(ModelRequest(name, "lm", 8), CPU)


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        build_model(ModelRequest(str(tmp_path), "lm", 8), CPU)


@pytest.mark.parametrize(
    "error, text",
    [
        ("401 Client Error: gated repo", "No token; give one by --token or HF_TOKEN"),
        ("Failed to resolve 'huggingface.co'", "cannot be reached"),
        ("surprise", "cannot be read"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(monkeypatch, error, text):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    request = ModelRequest("meta-llama/Llama-3.2-1B", "lm", 8)
    message = _why_not_fetched(request, OSError(error))
    assert text in message and "--model-name llama3-1b" in message


def test_the_shape_of_a_hub_id_needs_no_hub():
    request = ModelRequest("meta-llama/Llama-3.2-1B", "lm", 8, random_weights=True)
    assert request.shape is SHAPES["llama3-1b"]


@pytest.mark.slow
@pytest.mark.parametrize("name, low, high", [("llama3-1b", 1.4e9, 1.6e9), ("gpt2", 1.5e8, 1.8e8)])
def test_sizes_of_the_shapes_of_transformers(name, low, high):
    """Untied heads: 1.24B + 0.26B, and 124M + 39M."""
    model = build_model(ModelRequest(name, "lm", 16), torch.device("meta"))
    assert low < sum(p.numel() for p in model.parameters()) < high


def test_layers_of_the_norm_benchmark_are_those_of_the_model():
    model = build_model(ModelRequest("tiny", "lm", 8), CPU)
    linear = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert sorted(linear_layers("tiny")) == sorted(linear)
    with pytest.raises(UsageError, match="must be one of"):
        linear_layers("dit-xl-2")


def test_modes_come_from_the_package(monkeypatch):
    assert {"no_dp", "hooks", "ghost_fsdp", "auto"} <= set(available_modes()) <= set(HARNESS_MODES)
    assert resolve_mode("ghost_fsdp", 2).sharded and not resolve_mode("ghost", 1).sharded
    assert resolve_mode("auto", 2).sharded and not resolve_mode("auto", 1).sharded
    without = {k: v for k, v in package_modes().items() if not k.startswith("flash")}
    monkeypatch.setattr("memory_test.common.modes.package_modes", lambda: without)
    with pytest.raises(UsageError, match="flash_fsdp is not in this opacus"):
        resolve_mode("flash_fsdp", 2)
    monkeypatch.setattr(
        "memory_test.common.modes.package_modes", lambda: {**without, "flash_fsdp": None}
    )
    assert resolve_mode("flash_fsdp", 2).sharded


@pytest.mark.parametrize(
    "name, world, text",
    [
        ("nothing", 1, "no such mode; there are: no_dp"),
        ("hooks", 2, "runs in one process"),
        ("ghost_tp", 2, "tensor"),
    ],
)
def test_modes_that_cannot_be_run(name, world, text):
    with pytest.raises(UsageError, match=text):
        resolve_mode(name, world)
