"""The linear layer of recurrent networks."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample._samplers import by_rule, sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler
from opacus.layers.dp_rnn import RNNLinear


@register_grad_sampler(RNNLinear)
@by_rule
def compute_rnn_linear_grad_sample(
    layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Linear layer of a recurrent network: per-sample gradients ``{parameter: [B, *shape]}``.

    Args:
        layer: The layer.
        activations: Its inputs, batch first.
        backprops: Gradient of the summed losses with respect to its output.
    """
    return sample_with_rule(layer, activations, backprops)
