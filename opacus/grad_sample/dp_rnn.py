"""The linear layer of recurrent networks."""

from opacus.grad_sample._samplers import sample_with_rule
from opacus.grad_sample.utils import register_grad_sampler
from opacus.layers.dp_rnn import RNNLinear

compute_rnn_linear_grad_sample = register_grad_sampler(RNNLinear)(sample_with_rule)
