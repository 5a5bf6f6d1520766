"""Norms for embedding tables."""

from torch import nn

from opacus.grad_sample._samplers import norm_with_rule
from opacus.grad_sample.utils import register_norm_sampler

compute_embedding_norm_sample = register_norm_sampler(nn.Embedding)(norm_with_rule)
