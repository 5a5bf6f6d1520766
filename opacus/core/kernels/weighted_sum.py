"""Weighted sums of per-sample gradients, written straight to where they are needed."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.reference import widen


def weighted_sum(
    grads: Tensor, factors: Tensor, excluded: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """``sum_i factors[i] * grads[i]`` over the samples that are not excluded.

    Args:
        grads: ``[B, n]`` or ``[B, *shape]``, contiguous within a sample.
        factors: ``[B]``, fp32 or fp64.
        excluded: ``[B]`` bool; these rows contribute nothing even if they are not finite.
            ``None``: there are none.
        out: Where to write the result, of the same shape, any dtype and strides;
            by default a new tensor in at least fp32.

    Returns:
        ``[*shape]``. On a GPU nothing waits for the device.
    """
    shape = grads.shape[1:]
    if out is None:
        out = widen(grads.new_empty(0)).new_empty(shape)
    if grads.shape[0] == 0:
        return out.zero_()
    if grads.is_cuda and grads.is_contiguous() and out.dim() <= 3 and triton_works():
        return _on_gpu(grads, factors, excluded, out)
    if excluded is not None and (grads.is_cuda or bool(excluded.any())):
        rows = excluded.to(grads.device).view(-1, *[1] * (grads.dim() - 1))
        grads = grads.masked_fill(rows, 0.0)
    wide = widen(grads.new_empty(0)).dtype
    flat = widen(grads).reshape(len(grads), -1)
    total = factors.to(device=grads.device, dtype=wide) @ flat
    return out.copy_(total.view(shape))


@functools.cache
def triton_works() -> bool:
    """Whether Triton is installed and there is a GPU that it compiles for."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.is_available()


def _on_gpu(grads: Tensor, factors: Tensor, excluded: Tensor | None, out: Tensor) -> Tensor:
    from opacus.core.kernels import weighted_sum_triton

    mask: Any = torch.zeros_like(factors, dtype=torch.bool) if excluded is None else excluded
    weighted_sum_triton.launch(grads, factors, mask.to(grads.device), out)
    return out
