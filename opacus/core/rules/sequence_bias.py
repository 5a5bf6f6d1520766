"""The bias that attention appends to its keys and values as one more step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opacus.core.rules.base import LayerRule
from opacus.core.spec import LayerSpec


class SequenceBiasRule(LayerRule):
    """``[B, T, d] -> [B, T + 1, d]``: the gradient is the last step's backprop."""

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        return {"bias": backprops[:, -1]}
