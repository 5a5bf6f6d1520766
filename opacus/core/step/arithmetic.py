"""Arithmetic on losses of samples: what gives one loss a sample again, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# Functions of torch that give another private loss, besides the operators.
ARITHMETIC = frozenset(
    (
        "add", "__add__", "__radd__", "sub", "subtract", "rsub", "__rsub__", "mul", "multiply",
        "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__", "__rdiv__", "neg",
        "negative", "pow",
    )
)  # fmt: skip


def combined(function: Callable[..., Any], operands: Sequence[Any], are: Sequence[bool]) -> Any:
    """``function`` of the per-sample losses among ``operands``, as a private loss.

    Args:
        function: Of torch, or an operator.
        operands: What it is applied to.
        are: Which of them are private losses.

    Raises:
        ValueError: The losses have different reductions or loss scales, or the result is
            not one loss a sample.
    """
    losses: list[Any] = [o for o, is_loss in zip(operands, are, strict=True) if is_loss]
    first = losses[0]
    for other in losses[1:]:
        if other.loss_reduction != first.loss_reduction:
            raise ValueError(
                "Cannot combine losses with different reductions: "
                f"{first.loss_reduction} vs {other.loss_reduction}"
            )
    _check_scales(function, are[0], losses)
    pairs = list(zip(operands, are, strict=True))
    others = [o for o, is_loss in pairs if isinstance(o, Tensor) and not is_loss]
    joint = len(first.loss_per_sample) > 1  # of one sample any loss is its own
    if joint and any(other.requires_grad and not other.dim() for other in others):
        _refuse_joint(function)
    result = function(*[o.loss_per_sample if is_loss else o for o, is_loss in pairs])
    if result.shape != first.loss_per_sample.shape:
        raise ValueError(
            "the loss of ghost clipping can be combined with numbers and with losses of the same "
            f"batch; {tuple(first.loss_per_sample.shape)} losses became {tuple(result.shape)}"
        )
    loss = first._with(result)
    loss.loss_scale = first.loss_scale
    return loss


def _refuse_joint(function: Callable[..., Any]) -> None:
    raise ValueError(
        f"{function.__name__} of the criterion's losses and one ordinary loss for the whole batch: "
        "that one depends on all samples at once, so no sample's part of it can be clipped. Give "
        "one loss a sample (reduction='none', shape [batch]), or make a second criterion by "
        "DPLossFastGradientClipping(module, optimizer, other_criterion, loss_reduction). For a "
        "penalty on the parameters use optimizer.add_penalty, or weight_decay"
    )


def _check_scales(function: Callable[..., Any], first_is_loss: bool, losses: list[Any]) -> None:
    """Refuse arithmetic after which the factor on the gradients is not the loss scale."""
    scales = {None if o.loss_scale is None else float(o.loss_scale) for o in losses}
    if scales == {None}:
        return
    linear = len(losses) == 1 and (first_is_loss or "div" not in function.__name__)
    additive = function.__name__.strip("_") in ("add", "radd", "sub", "subtract", "rsub")
    if len(scales) > 1 or "pow" in function.__name__ or not (linear or additive):
        raise ValueError(
            "this arithmetic on losses that a GradScaler has scaled would change their scale: "
            "combine the losses first, then call scaler.scale(loss).backward()"
        )
