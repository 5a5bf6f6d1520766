"""The bias of keys and values in attention."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample._samplers import by_rule, sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler
from opacus.layers.dp_multihead_attention import SequenceBias


@register_grad_sampler(SequenceBias)
@by_rule
def compute_sequence_bias_grad_sample(
    layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Sequence bias: per-sample gradients ``{parameter: [B, *shape]}``.

    Args:
        layer: The layer.
        activations: Its inputs, batch first.
        backprops: Gradient of the summed losses with respect to its output.
    """
    return sample_with_rule(layer, activations, backprops)
