"""Convolutions."""

from torch import nn

from opacus.grad_sample._samplers import sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler

compute_conv_grad_sample = register_grad_sampler([nn.Conv1d, nn.Conv2d, nn.Conv3d])(
    sample_with_rule
)

# For ``nn.Conv2d``, under the name of Opacus' alternative way to compute it.
convolution2d_backward_as_a_convolution = sample_with_rule
