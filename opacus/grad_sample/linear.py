"""Linear layers."""

from torch import nn

from opacus.grad_sample._samplers import norm_with_rule, sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler, register_norm_sampler

compute_linear_grad_sample = register_grad_sampler(nn.Linear)(sample_with_rule)
compute_linear_norm_sample = register_norm_sampler(nn.Linear)(norm_with_rule)
