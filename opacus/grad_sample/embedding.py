"""Embedding tables."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample._samplers import sample_with_rule
from opacus.grad_sample.embedding_norm_sample import compute_embedding_norm_sample
from opacus.grad_sample.utils import register_grad_sampler

compute_embedding_grad_sample = register_grad_sampler(nn.Embedding)(sample_with_rule)
register_grad_sampler(nn.EmbeddingBag)(sample_with_rule)


def compute_embeddingbag_gradsampler(
    layer: nn.Module, inputs: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Bags of embeddings: per-sample gradients ``{parameter: [B, *shape]}``.

    Args:
        layer: The layer.
        inputs: Its input and, if it is one-dimensional, the offsets.
        backprops: Gradient of the summed losses with respect to its output.
    """
    return sample_with_rule(layer, inputs, backprops)


__all__ = [
    "compute_embedding_grad_sample",
    "compute_embedding_norm_sample",
    "compute_embeddingbag_gradsampler",
]
