"""Helpers shared by the optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.core.kernels.norms.reference import wide_dtype
from opacus.core.kernels.sums.weighted_sum import weighted_sum_each
from opacus.core.privacy.clipping import Clipped, excluded_or_none


def params(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters that the optimizer updates and that require gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def check_norm_count(norms: float | Sequence[float], parameters: int) -> None:
    """Refuse per-layer clipping norms that are not one for each parameter.

    Raises:
        ValueError: ``norms`` is no list, or has another length.
    """
    if not isinstance(norms, Sequence) or len(norms) != parameters:
        got = len(norms) if isinstance(norms, Sequence) else norms
        raise ValueError(
            "per-layer clipping needs max_grad_norm as a list with one number for each of the "
            f"{parameters} trainable parameters, got {got}"
        )


def check_rows(samples: list[Tensor]) -> None:
    """Refuse per-sample gradients of parameters that saw different numbers of samples.

    Raises:
        ValueError: Row i of one is then another sample than row i of the other.
    """
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for grad_sample in samples:
        shapes.setdefault(len(grad_sample), []).append(tuple(grad_sample.shape[1:]))
    if len(shapes) > 1:
        found = "; ".join(
            f"{rows} rows for {len(those)} of them, the first of shape {those[0]}"
            for rows, those in sorted(shapes.items(), key=lambda item: len(item[1]))
        )
        raise ValueError(
            f"parameters have per-sample gradients of different numbers of samples: {found}. "
            "Some layer does not have the samples in the first dimension of its input: a table "
            "indexed by positions (expand its indices to [batch, length], or freeze it), or a "
            "time-major model (use batch_first=False). Nothing was added to the model"
        )


def weighted_sums(clipped: Sequence[Clipped], samples: Sequence[Tensor]) -> list[Tensor]:
    """``sum_i factors[i] * samples[k][i]`` for each parameter k, on its device.

    In at least fp32: a sum of many samples that is rounded to half precision before it
    gets its noise changes by more than C with one of them. Excluded rows contribute
    nothing, NaN or not. On a GPU all sums are formed together,
    without waiting for the device.
    """
    sums: dict[int, Tensor] = {}
    for device in {grads.device for grads in samples}:
        places = [k for k, grads in enumerate(samples) if grads.device == device]
        formed = weighted_sum_each(
            [samples[k] for k in places],
            [clipped[k].factors.to(device) for k in places],
            excluded_or_none(clipped[places[0]].excluded.to(device)),
            [wide_dtype(samples[k]) for k in places],
        )
        sums |= dict(zip(places, formed, strict=True))
    return [sums[k] for k in range(len(samples))]
