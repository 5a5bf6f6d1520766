"""Per-sample gradient norms by Triton kernels; the public place of :mod:`opacus.core.kernels`.

The squared norm of a linear layer's per-sample gradient ``A_i^T G_i`` can be computed without the
gradient itself. Two algorithms are exact and differ in cost:

* ``"input_length"`` multiplies Gram matrices of the tokens, ``B T^2 (d + p)`` operations: for
  short inputs and wide layers (ghost norms, arXiv 2009.03106, 2110.05679).
* ``"width"`` squares tiles of the product while they are in registers, ``2 B T d p``
  operations: for long inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.host.operands import interpreted, triton_is_installed
from opacus.core.kernels.norms import choice
from opacus.core.kernels.norms.choice import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "compute_bias_norm_sq",
    "compute_embedding_norm_sq",
    "compute_grouped_linear_norm_sq",
    "compute_linear_norm_sq",
    "compute_normalisation_norm_sq",
    "is_triton_available",
]


def is_triton_available() -> bool:
    """Whether the Triton kernels run here: Triton is installed and there is a CUDA device.

    Also with ``TRITON_INTERPRET=1``, which interprets them on the CPU, for tests.
    """
    return triton_is_installed() and (torch.cuda.is_available() or interpreted())


def compute_linear_norm_sq(
    activations: Tensor,
    backprops: Tensor | Sequence[Tensor],
    *,
    algorithm: str | None = None,
    mask: Tensor | None = None,
) -> Any:
    """Squared norms of the per-sample gradients of a linear layer's weight.

    Args:
        activations: ``[B, *, d]``, any number of token dimensions; bf16, fp16 or fp32.
        backprops: ``[B, *, p]``, or a list of them for several layers with this input.
        algorithm: ``"input_length"``, ``"width"``, or ``None``: whichever was faster when it
            was measured on this card, the PyTorch reference included.
        mask: ``[B, *]``: bool (which tokens count) or weights that multiply a token's
            gradient. Masked tokens may be NaN.

    Returns:
        ``[B]`` in fp32 (fp64 for fp64, which only the reference takes), or a list of them.

    Raises:
        ValueError: Unknown algorithm, or shapes that do not belong together.
        RuntimeError: An algorithm was named and Triton cannot run it here.
    """
    several = not isinstance(backprops, Tensor)
    gs: list[Tensor] = list(backprops) if several else [backprops]  # type: ignore[list-item]
    for g in gs:
        if activations.dim() < 2 or activations.shape[:-1] != g.shape[:-1]:
            raise ValueError(
                "activations [B, *, d] and backprops [B, *, p] must agree in all dimensions but "
                f"the last, got {list(activations.shape)} and {list(g.shape)}"
            )
    a, gs = _tokens(activations), [_tokens(g) for g in gs]
    mask = _token_mask(mask, activations)
    norms = _linear(algorithm, a, gs)(a, gs, mask)
    return norms if several else norms[0]


def compute_grouped_linear_norm_sq(
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    algorithm: str | None = None,
    masks: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """:func:`compute_linear_norm_sq` of many layers in one launch.

    Args:
        pairs: Activations and backprops of each layer, of equal or different shapes.
        algorithm: As there.
        masks: A mask for each layer, all bool or all weights.

    Returns:
        ``[B]`` for each layer.

    Raises:
        ValueError: Unknown algorithm, or layers that one launch cannot take together.
        RuntimeError: An algorithm was named and Triton cannot run it here.
    """
    _check_algorithm(algorithm)
    flat = [(_tokens(a), _tokens(g)) for a, g in pairs]
    kept = None
    if masks is not None:
        kept = [m.reshape(a.shape[:2]) for m, (a, _) in zip(masks, flat, strict=True)]
    if algorithm is None:
        return choice.grouped_product_norm_sq(flat, kept)
    _require(*(t for pair in flat for t in pair))
    from opacus.core.kernels.norms import gram, width

    module = width if algorithm == choice.WIDTH else gram
    return module.grouped_norm_sq(flat, kept)


def compute_bias_norm_sq(backprops: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Squared norms ``[B]`` of the per-sample gradients of a bias.

    Args:
        backprops: ``[B, *, p]``.
        mask: As in :func:`compute_linear_norm_sq`.
    """
    return choice.bias_norm_sq(_tokens(backprops), _token_mask(mask, backprops))


def compute_normalisation_norm_sq(
    inputs: Tensor,
    backprops: Tensor,
    *,
    eps: float,
    centre: bool,
    bias: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Squared norms of a normalisation layer's weight and bias, in one pass over backprops.

    Args:
        inputs: ``[B, *, d]`` what the layer normalised over its last dimension.
        backprops: ``[B, *, d]``.
        eps: What the layer adds to the variance (LayerNorm) or mean square (RMSNorm).
        centre: Whether the mean is subtracted: LayerNorm does, RMSNorm does not.
        bias: Whether the layer has a bias.
        mask: As in :func:`compute_linear_norm_sq`.

    Returns:
        ``[B]`` of the weight, and of the bias or ``None``.
    """
    mask = _token_mask(mask, backprops)
    x, g = _tokens(inputs), _tokens(backprops)
    return choice.affine_norm_sq(x, g, eps=eps, centre=centre, bias=bias, mask=mask)


def compute_embedding_norm_sq(
    ids: Tensor,
    backprops: Tensor,
    *,
    padding_idx: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Squared norms ``[B]`` of the per-sample gradients of an embedding table.

    Args:
        ids: ``[B, *]`` rows that were looked up; rows looked up twice are added first.
        backprops: ``[B, *, d]``.
        padding_idx: A row that gets no gradient.
        mask: As in :func:`compute_linear_norm_sq`.
    """
    mask = _token_mask(mask, backprops)
    g = _tokens(backprops)
    return choice.embedding_norm_sq(ids.reshape(g.shape[:2]), g, padding_idx, mask)


def _linear(algorithm: str | None, a: Tensor, gs: list[Tensor]) -> Callable[..., list[Tensor]]:
    _check_algorithm(algorithm)
    if algorithm is None:
        return choice.shared_product_norm_sq
    _require(a, *gs)
    from opacus.core.kernels.norms import gram, width

    if algorithm == choice.INPUT_LENGTH:
        return gram.shared_norm_sq
    return lambda a, gs, mask: [width.norm_sq(a, g, mask) for g in gs]


def _check_algorithm(algorithm: str | None) -> None:
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {ALGORITHMS} or None, got {algorithm!r}")


def _require(*tensors: Tensor) -> None:
    if choice.is_usable(*tensors):
        return
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
    raise RuntimeError(
        "the Triton kernels need Triton, a CUDA device and bf16, fp16 or fp32 tensors on it, got "
        f"{', '.join(kinds)}; leave algorithm=None to use the PyTorch reference"
    )


def _tokens(tensor: Tensor) -> Tensor:
    """``[B, *, d] -> [B, T, d]``, a view where strides allow."""
    if tensor.dim() == 3:
        return tensor
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)


def _token_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape != like.shape[:-1]:
        raise ValueError(f"mask must have shape {list(like.shape[:-1])}, got {list(mask.shape)}")
    return mask.reshape(len(mask), -1) if mask.dim() > 1 else mask[:, None]
