"""Convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample._samplers import by_rule, sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler


@register_grad_sampler([nn.Conv1d, nn.Conv2d, nn.Conv3d])
@by_rule
def compute_conv_grad_sample(
    layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Convolution: per-sample gradients ``{parameter: [B, *shape]}``.

    Args:
        layer: The layer.
        activations: Its inputs, batch first.
        backprops: Gradient of the summed losses with respect to its output.
    """
    return sample_with_rule(layer, activations, backprops)


def convolution2d_backward_as_a_convolution(
    layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """The same for ``nn.Conv2d``, under the name of Opacus' alternative way to compute it."""
    return sample_with_rule(layer, activations, backprops)
