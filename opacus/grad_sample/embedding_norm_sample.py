"""Norms for embedding tables."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample._samplers import by_rule, norm_with_rule
from opacus.grad_sample.utils import register_norm_sampler


@register_norm_sampler(nn.Embedding)
@by_rule
def compute_embedding_norm_sample(
    layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Embedding table: per-sample gradient norms ``{parameter: [B]}``.

    Args:
        layer: The layer.
        activations: Its inputs, batch first.
        backprops: Gradient of the summed losses with respect to its output.
    """
    return norm_with_rule(layer, activations, backprops)
