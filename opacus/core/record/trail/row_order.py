"""Whether the rows of all that goes into a layer and comes out of it are of the same units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from opacus.core.record.trail.labels import Labels, State


def same_order(
    state: Callable[[Tensor], State], tensors: Sequence[Tensor], dim: int, output: Tensor
) -> bool:
    """Whether row i of tensors is of the unit that row i of a layer's output is of.

    A layer that runs again on some of its rows is given those of its inputs that its output has,
    so a layer that sorts rows would be given those of other units. Tensors with another number
    of rows, and what is not known, say nothing.

    Args:
        state: Whose a tensor is.
        tensors: The layer's inputs, and its other outputs.
        dim: Their dimension that has the rows.
        output: Of the layer.
    """
    own = state(output)
    if not isinstance(own, Labels) or output.dim() <= dim:
        return True
    rows, line = output.shape[dim], _rows(own.ids, dim)
    for tensor in tensors:
        labels = state(tensor)
        if not isinstance(labels, Labels) or tensor.dim() <= dim or tensor.shape[dim] != rows:
            continue
        other = _rows(labels.ids, dim).to(line.device)
        if line.shape[1] != other.shape[1] and 1 not in (line.shape[1], other.shape[1]):
            continue
        both = (line >= 0) & (other >= 0)
        if bool(((line != other) & both).any()):
            return False
    return True


def _rows(ids: Tensor, dim: int) -> Tensor:
    """``[R, *]``: the units of each row, with all other dimensions in one."""
    return ids.movedim(dim, 0).flatten(1) if ids.dim() > 1 else ids.reshape(-1, 1)
