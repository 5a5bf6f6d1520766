"""The bias that attention appends to its keys and values as one more step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opacus.core.rules.base import LayerRule, unsupported
from opacus.core.rules.spec import LayerSpec


class SequenceBiasRule(LayerRule):
    """``[B, T, d] -> [B, T + 1, d]``: the gradient is the last step's backprop."""

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        if backprops.dim() != 3:
            raise unsupported(spec, activations, backprops, "its output is not [B, T + 1, d]")
        return {"bias": backprops[:, -1]} if "bias" in spec.params else {}
