"""The rule of each kind of layer, in one table."""

from __future__ import annotations

from torch import nn

from opacus.core.rules.base import LayerRule
from opacus.core.rules.convolution import ConvRule
from opacus.core.rules.embedding import EmbeddingBagRule, EmbeddingRule
from opacus.core.rules.generic import GenericRule
from opacus.core.rules.linear import LinearRule
from opacus.core.rules.normalisation import (
    GroupNormRule,
    HuggingFaceRMSNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)
from opacus.core.rules.sequence_bias import SequenceBiasRule
from opacus.core.spec import layer_kind

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
# nothing has to be imported.
HUGGING_FACE_RMS_NORMS = frozenset(
    f"{family}RMSNorm"
    for family in (
        "Llama", "Llama4Text", "Mistral", "Mixtral", "Ministral", "Qwen2", "Qwen2Moe", "Qwen3",
        "Qwen3Moe", "Gemma", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Olmo3", "Olmoe", "Granite",
        "GraniteMoe", "Cohere", "DeepseekV2", "DeepseekV3", "Glm", "Glm4", "Starcoder", "Smollm3",
        "SmolLM3", "Jamba", "StableLm", "Helium", "Apertus",
    )
)  # fmt: skip
_HUGGING_FACE_RULE = HuggingFaceRMSNormRule()


def register_rule(kind: type[nn.Module], rule: LayerRule) -> None:
    """Use ``rule`` for layers whose class is exactly ``kind``."""
    RULES[kind] = rule


def rule_for(module: nn.Module) -> LayerRule:
    """The rule of a layer; the generic one if its class is not in the table."""
    kind = layer_kind(module)
    if kind in RULES:
        return RULES[kind]
    if _is_hugging_face_rms_norm(kind, module):
        return _HUGGING_FACE_RULE
    return GenericRule(module)


def _is_hugging_face_rms_norm(kind: type[nn.Module], module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    known = kind.__name__ in HUGGING_FACE_RMS_NORMS and kind.__module__.startswith("transformers.")
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return known and has_eps and weight is not None and weight.dim() == 1
