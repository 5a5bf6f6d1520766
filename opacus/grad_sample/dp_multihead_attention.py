"""The bias of keys and values in attention."""

from opacus.grad_sample._samplers import sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler
from opacus.layers.dp_multihead_attention import SequenceBias

compute_sequence_bias_grad_sample = register_grad_sampler(SequenceBias)(sample_with_rule)
