"""All rows of a unit as tokens of one row; see :mod:`opacus.core.rules.units`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opacus.core.rules.units import Units


def grouped_tokens(tensor: Tensor, features: int, units: Units) -> Tensor:
    """``[R, T, ..., *features]`` as ``[n, K, *features]``, row u with all tokens of unit u.

    Smaller units are filled up with zeros, whatever the values of others are.
    """
    split = tensor.dim() - features
    leading, width = tensor.shape[:split], tensor.shape[split:]
    if units.block is not None:
        tokens = units.block * math.prod(leading[1:])
        return tensor.reshape(units.count, tokens, *width)
    places, filler = units.places(leading, tensor.device)
    grouped = tensor.reshape(-1, *width)[places]
    if filler is None:
        return grouped
    return grouped.masked_fill_(filler.view(*filler.shape, *[1] * features), 0)


def regroup_tokens(
    x: Tensor, backprops: Tensor, units: Units, features: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """A layer whose gradient is a sum over rows and tokens: those of each unit as one row.

    Args:
        x: Input of the layer.
        backprops: Gradient with respect to its output.
        units: Of the output.
        features: Number of last dimensions of input and output that are no tokens.

    Raises:
        ValueError: See :func:`check_rows_of_units`, or input and output do not fit.
    """
    leading = backprops.shape[: backprops.dim() - features[1]]
    if x.shape[: x.dim() - features[0]] != leading:
        raise ValueError("its input and output do not have the same rows and tokens")
    check_rows_of_units(backprops, leading, units)
    return grouped_tokens(x, features[0], units), grouped_tokens(backprops, features[1], units)


def check_rows_of_units(backprops: Tensor, leading: torch.Size, units: Units) -> None:
    """Check that each row is of one unit, and that rows of nobody have no gradient.

    Raises:
        ValueError: They have, or there are several units in what counts as one row.
    """
    if units.ids is None:
        return
    try:
        ids = units.over(leading, backprops.device)
    except ValueError as error:
        raise ValueError(f"several units share one of its rows ({error})") from None
    if units.drops:
        return
    nobody = (ids < 0).reshape(*leading, *[1] * (backprops.dim() - len(leading)))
    if bool((backprops != 0).logical_and_(nobody).any()):
        raise ValueError("rows that were computed from no sample have a gradient")
