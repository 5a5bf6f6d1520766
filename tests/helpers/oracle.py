"""What is right, the slow way: one sample at a time, plain autograd, float64.

Nothing of the package is used here. Batches are tensors, or tuples, lists and dicts
of them, with the samples in dimension 0 of each tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

# Loss of a batch of one sample, from the model and that batch.
SampleLoss = Callable[[nn.Module, Any], Tensor]

# Added to the norms by which a clipping factor divides.
CLIPPING_EPS = 1e-6


def sample(batch: Any, index: int) -> Any:
    """Sample ``index`` of a batch, as a batch of one."""
    return tree_map(lambda t: t[index : index + 1] if isinstance(t, Tensor) else t, batch)


def batch_size(batch: Any) -> int:
    """Number of samples; all tensors have to agree on it."""
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(sizes) != 1:
        raise ValueError(f"the tensors of the batch have {sorted(sizes)} rows")
    return sizes.pop()


def to_double(value: Any) -> Any:
    """Floating-point tensors in float64; all else as it is."""

    def convert(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().double() if floating else leaf

    return tree_map(convert, value)


def per_sample_gradients(model: nn.Module, loss_fn: SampleLoss, batch: Any) -> dict[str, Tensor]:
    """Gradient of each sample's own loss, by name of the trainable parameter.

    Args:
        model: Left as it is; a float64 copy does the work.
        loss_fn: Called with the copy and a batch of one; returns that sample's loss.
        batch: B samples.

    Returns:
        ``[B, *shape]`` in float64; zero where a sample does not touch a parameter.
    """
    model, batch = copy.deepcopy(model).double(), to_double(batch)
    names, parameters = trainable(model)
    rows = []
    for i in range(batch_size(batch)):
        loss = loss_fn(model, sample(batch, i)).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append([grad.to_dense() for grad in grads])
    if not rows:
        return {n: p.new_zeros(0, *p.shape) for n, p in zip(names, parameters, strict=True)}
    return {
        n: torch.stack(column) for n, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Names and values of the parameters that require gradients, shared ones once."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [n for n, _ in named], [p for _, p in named]


def norms(gradients: Mapping[str, Tensor]) -> Tensor:
    """``[B]`` norm of each sample's whole gradient."""
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1).norm(dim=1)


def clipping_factors(norms: Tensor, max_grad_norm: float) -> Tensor:
    """``min(1, C / (norm + 1e-6))`` for each sample."""
    return (max_grad_norm / (norms + CLIPPING_EPS)).clamp(max=1.0)


def weighted_sum(gradients: Mapping[str, Tensor], factors: Tensor) -> dict[str, Tensor]:
    """``sum_i factors[i] * g_i`` by parameter name."""
    return {n: torch.tensordot(factors.to(g.dtype), g, dims=1) for n, g in gradients.items()}


def clipped_sum(gradients: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
    """Sum of the gradients after flat clipping of each sample's whole gradient."""
    return weighted_sum(gradients, clipping_factors(norms(gradients), max_grad_norm))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest wanted value; 0 for empty tensors.

    Not finite where ``got`` is not; infinite where zero is wanted and not got.
    """
    if got.shape != want.shape:
        raise AssertionError(f"got shape {tuple(got.shape)}, want {tuple(want.shape)}")
    if want.numel() == 0:
        return 0.0
    difference = (got.detach().double() - want.double()).abs().max().item()
    scale = want.double().abs().max().item()
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else float("inf")
