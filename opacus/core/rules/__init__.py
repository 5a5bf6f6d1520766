"""The rule of each kind of layer, in one table."""

from __future__ import annotations

from torch import nn

from opacus.core.rules.base import LayerRule
from opacus.core.rules.convolution import ConvRule
from opacus.core.rules.embedding import EmbeddingBagRule, EmbeddingRule
from opacus.core.rules.float8 import Float8LinearRule, coupled_by_scales, is_float8_linear
from opacus.core.rules.generic import GenericRule
from opacus.core.rules.linear import LinearRule, TransposedLinearRule
from opacus.core.rules.normalisation import (
    GroupNormRule,
    HuggingFaceRMSNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)
from opacus.core.rules.sequence_bias import SequenceBiasRule
from opacus.core.rules.spec import layer_kind

__all__ = [
    "HUGGING_FACE_RMS_NORMS",
    "RULES",
    "LayerRule",
    "LinearRule",
    "SequenceBiasRule",
    "register_rule",
    "rule_for",
]

# By exact class: a subclass may compute something else.
RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LinearRule(),
    nn.modules.linear.NonDynamicallyQuantizableLinear: LinearRule(),
    nn.Embedding: EmbeddingRule(),
    nn.EmbeddingBag: EmbeddingBagRule(),
    nn.Conv1d: ConvRule(),
    nn.Conv2d: ConvRule(),
    nn.Conv3d: ConvRule(),
    nn.LayerNorm: LayerNormRule(),
    nn.RMSNorm: RMSNormRule(),
    nn.GroupNorm: GroupNormRule(),
    nn.InstanceNorm1d: InstanceNormRule(),
    nn.InstanceNorm2d: InstanceNormRule(),
    nn.InstanceNorm3d: InstanceNormRule(),
}

# Hugging Face gives each model family its own class; they are known by name, so that
# nothing has to be imported. A name is here only after its formula was checked.
HUGGING_FACE_RMS_NORMS = frozenset(
    f"{family}RMSNorm"
    for family in (
        "Apertus", "Arcee", "Bamba", "BitNet", "Chameleon", "Csm", "Cwm", "DeepseekV2",
        "DeepseekV3", "DiffLlama", "Doge", "Dots1", "Emu3", "Ernie4_5", "Ernie4_5_Moe",
        "Exaone4", "FalconH1", "FalconMamba", "FlexOlmo", "Gemma", "Gemma2", "Gemma3",
        "Gemma3n", "Gemma4", "Glm", "Glm4", "Glm4Moe", "Glm4v", "GptOss", "Granite",
        "GraniteMoe", "GraniteMoeHybrid", "Helium", "HunYuanDenseV1", "HunYuanMoEV1",
        "Idefics2", "Idefics3", "Jamba", "JetMoe", "Lfm2", "Lfm2Moe", "Llama", "Llama4Text",
        "LongcatFlash", "Mamba", "Mamba2", "MiniMax", "MiniMaxM2", "Ministral",
        "Ministral3", "Mistral", "Mistral3", "Mistral4", "Mixtral", "MllamaText", "Moshi",
        "NemotronH", "Olmo2", "Olmo3", "Olmoe", "Phi3", "Phi4Multimodal", "Pixtral",
        "Qwen2", "Qwen2Moe", "Qwen2VL", "Qwen2_5_VL", "Qwen3", "Qwen3Moe", "Qwen3Next",
        "Qwen3_5", "Qwen3_5Moe", "RecurrentGemma", "SeedOss", "SmolLM3", "T5Gemma",
        "VaultGemma", "Zamba", "Zamba2",
    )
)  # fmt: skip
_HUGGING_FACE_RULE = HuggingFaceRMSNormRule()
_HUGGING_FACE_CONV1D_RULE = TransposedLinearRule()
_FLOAT8_RULE = Float8LinearRule()


def register_rule(kind: type[nn.Module], rule: LayerRule) -> None:
    """Use ``rule`` for layers whose class is exactly ``kind``."""
    RULES[kind] = rule


def rule_for(module: nn.Module) -> LayerRule:
    """The rule of a layer; the generic one if its class is not in the table.

    Raises:
        ValueError: It is a float8 layer in which one sample changes what others compute.
    """
    kind = layer_kind(module)
    if _has_replaced_parameters(kind, module):
        return GenericRule(module)
    if kind in RULES:
        return RULES[kind]
    if is_float8_linear(kind):
        return _float8_rule(module)
    if _is_hugging_face_rms_norm(kind, module):
        return _HUGGING_FACE_RULE
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return _HUGGING_FACE_CONV1D_RULE
    return GenericRule(module)


def _float8_rule(module: nn.Module) -> LayerRule:
    wrong = coupled_by_scales(module)
    if wrong is not None:
        raise ValueError(f"{type(module).__name__}({module.extra_repr()}): {wrong}")
    return _FLOAT8_RULE


def _has_replaced_parameters(kind: type[nn.Module], module: nn.Module) -> bool:
    """Whether a layer of torch computes its weight from others (``weight_norm`` by hooks)."""
    own = module._parameters.keys()
    return kind.__module__.startswith("torch.nn.") and not own <= {"weight", "bias"}


def _is_hugging_face_rms_norm(kind: type[nn.Module], module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    known = kind.__name__ in HUGGING_FACE_RMS_NORMS and kind.__module__.startswith("transformers.")
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return known and has_eps and weight is not None and weight.dim() == 1
