"""Root mean square normalisation."""

from torch import nn

from opacus.grad_sample._samplers import sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler

compute_rms_norm_grad_sample = register_grad_sampler(nn.RMSNorm)(sample_with_rule)
