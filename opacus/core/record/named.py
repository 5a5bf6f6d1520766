"""Units that the user names: users with several rows, documents in one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units

POSITIONS = "position_ids"
BOUNDARIES = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
DOCUMENTS = (POSITIONS, *BOUNDARIES)  # numbered anew in each batch
# What names are made of: integers that int64 holds.
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})
_INTEGERS |= {torch.uint8, torch.uint16, torch.uint32, torch.bool}


@dataclass(frozen=True, eq=False)
class NamedUnits:
    """The unit of each row, or of each token, of one batch.

    Attributes:
        ids: ``[R]`` or ``[R, T]`` int64, 0 to n - 1, -1 for rows or tokens of nobody.
        count: Number of units n.
        names: ``[n]``, what the user calls them.
        note: See :class:`~opacus.core.record.passes.ForwardPass`.
    """

    ids: Tensor
    count: int
    names: Tensor
    note: Callable[[], None] | None = None

    @classmethod
    def numbered(cls, ids: Tensor, count: int) -> NamedUnits:
        """Units whose names are their numbers."""
        return cls(ids, count, torch.arange(count, device=ids.device))

    @property
    def by_token(self) -> bool:
        """Whether tokens have names of their own, rather than whole rows."""
        return self.ids.dim() == 2

    def of_layer(
        self, spec: LayerSpec, units: Units | None, output: Tensor, batch_dim: int
    ) -> Units:
        """The units of a layer's output.

        Args:
            spec: The layer.
            units: The rows of the batch that its rows are of; ``None`` if row i is row i.
            output: Of the layer.
            batch_dim: Its dimension of rows.

        Raises:
            ValueError: The units of the tokens are unknown; names the layer.
        """
        if not self.by_token:
            rows = Units(len(self.ids), dim=batch_dim) if units is None else units
            return rows.renamed(self.ids, self.count)
        shape = tuple(output.shape)
        if shape[:2] == tuple(self.ids.shape):
            return Units(self.count, ids=self.ids, drops=True)
        if shape[:1] == (self.ids.numel(),):
            return Units(self.count, ids=self.ids.reshape(-1), drops=True)
        raise ValueError(
            f"{spec} gives {shape}, in a batch whose units are named by token "
            f"{tuple(self.ids.shape)}, so whose these rows are is not known: its output has to be "
            "[rows, tokens, ...] or [rows * tokens, ...]. Or freeze it"
        )

    def same(self, other: NamedUnits) -> bool:
        """Whether row i is of the same unit in both."""
        return torch.equal(self.ids, other.ids) and torch.equal(self.names, other.names)

    def sums(self, losses: Tensor, valid: Tensor | None, mean: bool) -> Tensor:
        """``[n]`` losses of units.

        Args:
            losses: One for each row or token, in the order of ``ids``; for tokens the last one of
                each row may be missing, as that of a next token is.
            valid: Which of them count in a mean, ``None`` for all; of the shape of ``losses``.
            mean: Whether tokens are averaged over a unit; rows are added up.

        Raises:
            ValueError: They are not one for each.
        """
        ids = self.ids
        if ids.dim() == 2 and losses.numel() == ids.shape[0] * (ids.shape[1] - 1):
            same = ids[:, 1:] == ids[:, :-1]
            ids = ids[:, :-1].masked_fill(~same, -1)  # no unit learns the start of another one
        if losses.numel() != ids.numel():
            raise ValueError(
                f"the criterion returned losses of shape {tuple(losses.shape)} in a batch whose "
                f"units are named by {tuple(self.ids.shape)}: it has to give one loss for each"
            )
        slots = ids.reshape(-1).to(losses.device)
        slots = slots.where(slots >= 0, self.count)
        flat = losses.reshape(-1)
        total = flat.new_zeros(self.count + 1).index_add(0, slots, flat)[: self.count]
        if not mean or ids.dim() == 1:
            return total
        ones = torch.ones_like(flat) if valid is None else valid.reshape(-1).to(flat)
        sizes = flat.new_zeros(self.count + 1).index_add(0, slots, ones.detach())[: self.count]
        return total / sizes.clamp(min=1)


def gives_units(key: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the model was called with the names of units; see :func:`take_units`."""
    return key in kwargs or bool(args and isinstance(args[0], Mapping) and key in args[0])


def take_units(key: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, Tensor]:
    """The arguments of the model without the names of units, and the names.

    Args:
        key: A keyword, or the key of a batch that is a dictionary. ``position_ids`` and
            ``cu_seqlens`` say where documents start, and stay arguments of the model.

    Raises:
        ValueError: There is no such tensor of ``[rows]`` or ``[rows, tokens]`` integers.
    """
    batch: Any = kwargs
    if key not in kwargs and args and isinstance(args[0], Mapping):
        batch = dict(args[0])
        args = (batch, *args[1:])
    value = batch.get(key)
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS or value.dim() not in (1, 2):
        tensor = isinstance(value, Tensor)
        got = f"{tuple(value.shape)} {value.dtype}" if tensor else repr(value)[:80]
        raise ValueError(
            f"privacy_unit={key!r}: the model has to be called with {key}=, a tensor of integers "
            f"[rows] or [rows, tokens] that says whose each row or token is (-1: nobody's), got "
            f"{got}"
        )
    names = value.detach().long()
    if key in BOUNDARIES:
        return args, kwargs, _between(key, names)
    if key == POSITIONS:
        return args, kwargs, _from_starts(key, names)
    if batch is kwargs:
        kwargs = {k: v for k, v in kwargs.items() if k != key}
    else:
        del batch[key]
    return args, kwargs, names


def _between(key: str, boundaries: Tensor) -> Tensor:
    """``[1, T]``: the document of each token, by where documents start and the last one ends.

    ``[0]`` where there are none, in a batch of no rows.

    Raises:
        ValueError: They do not start at 0, or go back.
    """
    if boundaries.shape == (0,):
        return boundaries
    places = boundaries.tolist() if boundaries.dim() == 1 else []
    if not places or places[0] != 0 or places != sorted(places):
        raise ValueError(
            f"{key} has to be [documents + 1], with 0 first, where each document starts and the "
            f"last one ends, got {boundaries.tolist()}"
        )
    steps = torch.arange(places[-1], device=boundaries.device)
    return torch.bucketize(steps, boundaries[1:], right=True)[None]


def _from_starts(key: str, positions: Tensor) -> Tensor:
    """``[R, T]``: the document of each token, by the tokens' positions in it.

    Raises:
        ValueError: A row begins within a document, whose beginning would be another unit.
    """
    starts = positions == 0
    if not bool(starts[..., :1].all()):
        raise ValueError(
            f"{key} starts a row with another number than 0, but a document starts where it is 0: "
            "let no document go on in another row, and count its tokens from 0"
        )
    ids = starts.reshape(-1).cumsum(0).sub_(1).view(positions.shape)
    return ids if ids.dim() == 2 else ids[None]


def other_inputs(key: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """What the model gets besides the argument that names units, or says where they start."""
    known = [
        {k: v for k, v in part.items() if k != key} if isinstance(part, Mapping) else part
        for part in (*args, kwargs)
    ]
    return tree_leaves(known)


def named_units(key: str, value: Tensor, inputs: list[Any]) -> NamedUnits:
    """Units from the names that the user gave.

    Raises:
        ValueError: They are negative, other than -1, or not those of the rows (and tokens) of the
            model's inputs.
    """
    if bool((value < -1).any()):
        raise ValueError(f"{key} has negative numbers other than -1, which stands for nobody")
    fits = [t for t in inputs if isinstance(t, Tensor) and t.shape[: value.dim()] == value.shape]
    if not fits:
        shapes = [tuple(t.shape) for t in inputs if isinstance(t, Tensor)]
        raise ValueError(
            f"{key} has shape {tuple(value.shape)}, but no input of the model begins with that "
            f"(rows, or rows and tokens): {shapes}"
        )
    names, dense = value[value >= 0].unique(return_inverse=True)
    ids = torch.full_like(value, -1, dtype=torch.int64).masked_scatter_(value >= 0, dense)
    return NamedUnits(ids, len(names), names)
