"""Per-sample gradient rules of the layers of this package.

Where the batch is in these layers is known, whatever the model around them does;
the option ``batch_first`` of the spec says it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus.core.rules import LinearRule, SequenceBiasRule, register_rule
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.linear import BatchFirstLinear, RNNLinear


class BatchFirstLinearRule(LinearRule):
    """A linear layer that sees the batch in dimension 0."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        """Static attributes, and where the batch is."""
        return {**super().options(module), "batch_first": True}


class LaidOutSequenceBiasRule(SequenceBiasRule):
    """A sequence bias that sees the batch where its argument ``batch_first`` says."""

    def options(self, module: nn.Module) -> dict[str, Any]:
        """Static attributes, and where the batch is."""
        return {**super().options(module), "batch_first": module.batch_first}


register_rule(BatchFirstLinear, BatchFirstLinearRule())
register_rule(RNNLinear, BatchFirstLinearRule())
register_rule(SequenceBias, LaidOutSequenceBiasRule())
