"""Families of transformers' models: right against an oracle of one example at a time, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.oracle import CLIPPING_EPS, norms, per_sample_gradients, trainable
from tests.integrations.tiny import VOCABULARY

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

B, T = 3, 6
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "dropout": 0.0, "dropout_rate": 0.0, "activation_dropout": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "resid_dropout": 0.0,
    "embedding_dropout": 0.0, "classifier_dropout": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip


@dataclass
class Family:
    """A model class with a tiny configuration.

    Attributes:
        model: Its name in transformers; the configuration's is the family's.
        config: What differs from ``TINY``.
        batch: Inputs by name, ``[B, ...]``.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[], dict[str, Tensor]] = lambda: {"input_ids": ids(1)}
    configuration: str = ""
    tiny: bool = True

    def build(self) -> nn.Module:
        name = self.configuration or self.model.split("For")[0] + "Config"
        every = {**(TINY if self.tiny else {}), **NO_DROPOUT, **self.config}
        settings = {k: v for k, v in every.items() if v is not None}
        torch.manual_seed(0)
        config = getattr(transformers, name)(**settings)
        config._attn_implementation = "eager"
        return getattr(transformers, self.model)(config).train()


def ids(seed: int, length: int = T) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (B, length), generator=draw)


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def sounds() -> dict[str, Tensor]:
    return {"input_values": torch.randn(B, 400, generator=torch.Generator().manual_seed(1))}


def spectra() -> dict[str, Tensor]:
    features = torch.randn(B, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": ids(2, 5)}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": ids(1), "decoder_input_ids": ids(2, 5)}


def causal(name: str, **config: Any) -> Family:
    return Family(f"{name}ForCausalLM", config)


ENCODER_DECODER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4}
FAMILIES: dict[str, Family] = {
    "Llama": causal("Llama"),
    "Mistral": causal("Mistral"),
    "Qwen2": causal("Qwen2"),
    "Qwen3": causal("Qwen3"),
    "Gemma2": causal("Gemma2"),
    "Gemma3": Family("Gemma3ForCausalLM", {"sliding_window": 4}, configuration="Gemma3TextConfig"),
    "Phi3": causal("Phi3"),
    "GPTNeoX": causal("GPTNeoX"),
    "GPT2": Family("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
                   configuration="GPT2Config"),
    "OPT": causal("OPT", ffn_dim=24, word_embed_proj_dim=16),
    "Bloom": causal("Bloom", n_head=2, n_layer=2),
    "Falcon": causal("Falcon", head_dim=None),
    "OLMo2": causal("Olmo2"),
    "Granite": causal("Granite"),
    "SmolLM3": causal("SmolLM3"),
    "Cohere": causal("Cohere"),
    "StableLm": causal("StableLm"),
    "Mamba": causal("Mamba", state_size=4, expand=2, time_step_rank=4),
    "Mamba2": causal("Mamba2", state_size=4, expand=2, num_heads=4, head_dim=8, n_groups=1,
                     chunk_size=4),
    "Qwen3-Next": causal("Qwen3Next", linear_num_key_heads=2, linear_num_value_heads=2,
                         linear_key_head_dim=4, linear_value_head_dim=4, num_experts=0,
                         full_attention_interval=2),
    "Mixtral": causal("Mixtral", **EXPERTS),
    "OlmoE": causal("Olmoe", **EXPERTS),
    "GptOss": causal("GptOss", **EXPERTS),
    "DeepseekV3": causal("DeepseekV3", n_routed_experts=4, num_experts_per_tok=2, n_group=1,
                         topk_group=1, moe_intermediate_size=8, first_k_dense_replace=1,
                         q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
                         v_head_dim=8, head_dim=None),
    "ModernBERT": Family("ModernBertForSequenceClassification", {"global_attn_every_n_layers": 2,
                         "local_attention": 4}),
    "Whisper": Family("WhisperForConditionalGeneration",
                      {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10,
                       "max_target_positions": 16}, spectra),
    "Qwen2Moe": causal("Qwen2Moe", **EXPERTS, moe_intermediate_size=8,
                       shared_expert_intermediate_size=8),
    "BART": Family("BartForConditionalGeneration", ENCODER_DECODER, pairs),
    "T5": Family("T5ForConditionalGeneration",
                 {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
                  "decoder_start_token_id": 0}, pairs),
    "DeBERTa-v2": Family("DebertaV2ForSequenceClassification",
                         {"relative_attention": True, "position_buckets": 4,
                          "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 16,
                          "pooler_dropout": 0.0}),
    "DeBERTa": Family("DebertaForSequenceClassification",
                      {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                       "pooler_hidden_size": 16, "pooler_dropout": 0.0}),
    "Wav2Vec2": Family("Wav2Vec2ForSequenceClassification",
                       {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4),
                        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
                        "num_conv_pos_embedding_groups": 2, "feat_proj_dropout": 0.0,
                        "layerdrop": 0.0, "mask_time_prob": 0.0, "classifier_proj_size": 8,
                        "final_dropout": 0.0, "apply_spec_augment": False}, sounds),
    "Swin v2": Family("Swinv2ForImageClassification",
                      {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1],
                       "num_heads": [2, 2], "window_size": 2}, pictures, tiny=False),
    "Swin": Family("SwinForImageClassification",
                   {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1],
                    "num_heads": [2, 2], "window_size": 2}, pictures, tiny=False),
    "ViT": Family("ViTForImageClassification", {"image_size": 16, "patch_size": 4}, pictures),
    "BERT": Family("BertForSequenceClassification"),
}  # fmt: skip


# Experts are run by grouped products, which torch does not have in float64.
SINGLE = ("Mixtral", "Qwen2Moe", "OlmoE", "GptOss", "DeepseekV3")


# Layers with parameters of their own run again for their gradients, which a cache would notice.
NO_CACHE = ("gpt_oss", "qwen3_next")


class OwnLoss(nn.Module):
    """One number of each example's own logits, ``[B]`` or their mean."""

    reduction = "mean"

    def forward(self, logits: Tensor, numbers: Tensor) -> Tensor:
        flat = logits.flatten(1)
        weights = torch.arange(flat.shape[1], dtype=flat.dtype).add(1).sin()
        losses = (flat.tanh() * weights).sum(1) * numbers
        return losses if self.reduction == "none" else losses.mean()


def run(model: Any, batch: dict[str, Tensor]) -> Tensor:
    if model.dtype == torch.float64:
        model.config._experts_implementation = "eager"
    more = {"use_cache": False} if model.config.model_type in NO_CACHE else {}
    outputs = model(**{k: v for k, v in batch.items() if k != "numbers"}, **more)
    return outputs.logits


# Family: what is refused by name, and where LoRA's adapters go, which are right.
REFUSED: dict[str, tuple[str, list[str]]] = {
    "DeBERTa": (r"rel_embeddings.*or freeze it", ["in_proj", "pos_proj", "pos_q_proj"]),
}


def check(name: str, model: Any, mode: str) -> None:
    """The clipped mean of one step is that of the oracle."""
    dtype = torch.float32 if name in SINGLE else torch.float64
    model, criterion = model.to(dtype), OwnLoss()
    numbers = torch.arange(1, B + 1, dtype=dtype)
    own = FAMILIES[name].batch()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in own.items()}
    rows = per_sample_gradients(
        model, lambda m, one: criterion(run(m, one), one["numbers"]), {**batch, "numbers": numbers}
    )
    lengths = norms(rows)
    c = float(lengths.min()) / 2
    result = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(trainable(model)[1], lr=0.0), criterion=criterion,
        data_loader=DataLoader(TensorDataset(torch.zeros(B, 1)), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=c, poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    loss = result[2] if len(result) == 4 else criterion
    loss(run(result[0], batch), numbers).backward()
    result[1].step()
    factors = c / (lengths + CLIPPING_EPS)
    for part, parameter in zip(*trainable(model), strict=True):
        expected = torch.einsum("b,b...->...", factors, rows[part]) / B
        error = float((parameter.grad - expected).abs().max()) / c
        assert error < (1e-5 if name in SINGLE else 1e-7), part


IN_HOOKS = ("GPT2", "Mamba", "Mixtral", "Wav2Vec2")  # the other modes run the same rules
CASES = [(name, "ghost_bk") for name in FAMILIES] + [(name, "hooks") for name in IN_HOOKS]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_family(name: str, mode: str) -> None:
    if name not in REFUSED:
        check(name, FAMILIES[name].build(), mode)
        return
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[name][0]):
        check(name, FAMILIES[name].build(), mode)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("name", ["T5", "BART", "DeBERTa-v2", "Swin"])
def test_checkpoints_of_layers_that_run_once_for_all_samples(name: str, mode: str) -> None:
    family = FAMILIES[name]
    more = {"num_layers": 2} if name == "T5" else {}  # the second block has the first one's table
    model = replace(family, config={**family.config, **more}).build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(name, model, mode)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_deberta_with_its_table_frozen(mode: str) -> None:
    """Its projections of positions run once for all samples, and are divided in place."""
    model: Any = FAMILIES["DeBERTa"].build()
    model.deberta.encoder.rel_embeddings.requires_grad_(False)
    check("DeBERTa", model, mode)


def test_a_layer_with_a_cache_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integrations.test_model_zoo.NO_CACHE", ())
    with pytest.raises(ValueError, match=r"self_attn.*GptOssAttention.*use_cache=False"):
        check("GptOss", FAMILIES["GptOss"].build(), "ghost_bk")


@pytest.mark.slow
def test_a_whole_model_that_is_compiled() -> None:
    torch._dynamo.reset()
    model: Any = FAMILIES["Llama"].build()
    model.compile(backend="aot_eager")
    check("Llama", model, "ghost_bk")
    torch._dynamo.reset()


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_where_all_weights_are_refused(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = FAMILIES[name].build()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=REFUSED[name][1]))
    torch.manual_seed(2)
    for parameter in trainable(adapted)[1]:
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    check(name, adapted.train(), "ghost_bk")
