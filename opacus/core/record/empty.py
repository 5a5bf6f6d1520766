"""Empty batches in models that cannot run on no rows.

Note [A made-up row]
    Poisson sampling draws empty batches, and many models fail on them (the attention of
    ``transformers`` among them). So a training forward on no rows runs on one made-up row. Layers'
    records of it have no rows, and the model's outputs lose it again: nothing of it is measured,
    summed or returned, while every layer, and every collective of FSDP2, runs as in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_with_path

from opacus.core.platform.trees import map_tensors


def with_a_row(args: Any, kwargs: Any, dim: int) -> tuple[Any, Any]:
    """The arguments of a model with one made-up row in the tensors that have none.

    It holds zeros, so that indices are valid; masks (of bools, or named so) let it be seen.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        dim: Dimension of tensors that counts samples.
    """

    def filled(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim]:
            return value
        shape = list(value.shape)
        shape[dim] = 1
        seen = value.dtype == torch.bool or "mask" in str(path)
        return value.new_ones(shape) if seen else value.new_zeros(shape)

    return tree_map_with_path(filled, (args, kwargs))  # type: ignore[no-any-return]


def without_the_row(output: Any, dim: int) -> Any:
    """The outputs of a model without the made-up row; numbers of the batch become 0."""

    def emptied(value: Tensor) -> Tensor:
        if not value.dim():
            return value * 0
        one = value.dim() > dim and value.shape[dim] == 1
        return value.narrow(dim, 0, 0) if one else value

    return map_tensors(emptied, output)
