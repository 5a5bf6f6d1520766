"""One loss a sample, from the unreduced output of a criterion."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Reductions of torch's losses that are means over samples.
MEANS = ("mean", "batchmean")


def is_ctc(criterion: Any) -> bool:
    """Whether this is torch's CTC loss, whose first argument has time first."""
    return isinstance(criterion, nn.CTCLoss) or criterion is functional.ctc_loss


def as_reduced(criterion: Any, losses: Any, args: Any, kwargs: Any, reduction: str) -> Any:
    """Unreduced losses, after what torch's own mean does to each sample's before the mean.

    ``"batchmean"`` adds up all elements of a row; CTC divides by the length of the target.

    Args:
        criterion: The user's, with its own ``reduction``.
        losses: What it returned without reduction.
        args: What it was called with.
        kwargs: The same.
        reduction: ``"mean"`` or ``"sum"`` over samples.
    """
    if not isinstance(losses, Tensor) or losses.dim() == 0:
        return losses
    if getattr(criterion, "reduction", None) == "batchmean":
        return losses.flatten(1).sum(1) if losses.dim() > 1 else losses
    if not is_ctc(criterion) or reduction != "mean":
        return losses
    lengths = kwargs["target_lengths"] if "target_lengths" in kwargs else args[3]
    return losses / torch.as_tensor(lengths, device=losses.device).clamp(min=1)


def rows_of(criterion: Any, losses: Any, args: Any, kwargs: Any) -> int | None:
    """Number of rows that a criterion was called on; ``None`` if its arguments do not tell.

    Args:
        criterion: The user's.
        losses: What it returned without reduction.
        args: What it was called with.
        kwargs: The same.
    """
    if is_ctc(criterion) and isinstance(losses, Tensor) and losses.dim() > 0:
        return len(losses)
    given = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() > 0)
    first = next(given, None)
    return None if first is None else first.shape[0]


def samples_in(shape: Any, losses: Any) -> int:
    """Number of samples by the shape of the outputs that a criterion was called on, flattened.

    Args:
        shape: ``(B, T, ...)``, as the user gave it.
        losses: What the criterion returned without reduction.

    Raises:
        TypeError: That is no shape.
        ValueError: The losses cannot be those of so many samples.
    """
    try:
        sizes = [operator.index(size) for size in shape]
    except TypeError:
        sizes = []
    if not sizes:
        raise TypeError(
            "shape must be the shape that the outputs had before they were flattened, such as "
            f"(batch, length, classes), got {shape!r}"
        )
    samples = sizes[0]
    given = tuple(losses.shape) if isinstance(losses, Tensor) else ()
    whole = len(given) == 1 and 0 < samples <= given[0] and given[0] % samples == 0
    if given and given[0] != samples and not whole:
        raise ValueError(
            f"shape={tuple(sizes)} says that there are {samples} samples, but the criterion "
            f"returned losses of shape {given}: the first number of "
            "shape must be that of the samples, whose positions were flattened into one dimension"
        )
    return samples


def per_sample_losses(
    losses: Any,
    *,
    rows: int | None,
    samples: int | None,
    targets: Any,
    ignore_index: int | None,
    reduction: str,
) -> Tensor:
    """Reduce unreduced losses to ``[B]``.

    Args:
        losses: ``[B]``, ``[B, ...]`` or flattened ``[B * T]``.
        rows: Number of rows the criterion was called on, if known.
        samples: Number of samples B, if known; where it differs from the number of
            losses, these were flattened.
        targets: Targets, to find the positions with ``ignore_index``.
        ignore_index: Target value that takes no part in a mean; a sample without any
            other has loss 0.
        reduction: ``"mean"`` or ``"sum"`` over the positions of a sample.

    Raises:
        ValueError: ``losses`` is not one loss (or more) a sample. A loss that mixes
            samples cannot be clipped.
    """
    if not isinstance(losses, Tensor) or losses.dim() == 0:
        raise ValueError(
            "the criterion returned one loss for the whole batch; ghost clipping needs one a "
            "sample. Give it an attribute `reduction` that it honours (set to 'none' during the "
            f"call), or let it return a tensor of shape [batch]; got {_describe(losses)}"
        )
    flattened = samples is not None and losses.dim() == 1 and losses.shape[0] != samples
    if flattened:
        losses = _unflatten(losses, samples or 0)
    elif rows is not None and losses.shape[0] != rows:
        raise ValueError(
            f"the criterion returned losses of shape {tuple(losses.shape)} for {rows} "
            "samples; ghost clipping needs the sample in the first dimension"
        )
    if losses.dim() == 1:
        return losses
    flat = losses.flatten(1)  # also of no samples
    if reduction == "sum" or flat.shape[1] == 0:
        return flat.sum(1)
    if ignore_index is None or not isinstance(targets, Tensor) or targets.numel() != flat.numel():
        return flat.mean(1)
    valid = (targets.reshape(flat.shape) != ignore_index).sum(1).clamp(min=1)
    return flat.sum(1) / valid


def _unflatten(losses: Tensor, samples: int) -> Tensor:
    if samples == 0 or losses.shape[0] % samples:
        raise ValueError(
            f"the criterion returned {losses.shape[0]} losses for {samples} samples; pass the "
            "shape of the unflattened logits as criterion(..., shape=(batch, length, classes)), or "
            "batch_first=False to make_private if dimension 0 of the model's inputs is time"
        )
    return losses.reshape(samples, -1)


def _describe(losses: Any) -> str:
    return f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(type(losses))
