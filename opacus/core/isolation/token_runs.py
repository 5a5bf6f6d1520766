"""Runs of a model on units that are tokens of its rows; see :mod:`opacus.core.isolation.check`."""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.isolation.probe import Start
from opacus.core.isolation.unit_slices import fitted
from opacus.core.isolation.watch import Watch, WatchedRuns, output_at
from opacus.core.platform.trees import map_tensors, tensors_of
from opacus.core.record.named import BOUNDARIES, NamedUnits

_BOUNDARIES = (*BOUNDARIES, "cu_seq_lens_k")
_NOT_OF_TOKENS = "its rows hold several samples each, and its outputs are not those of tokens"


class TokenRuns(WatchedRuns):
    """Runs of *pieces*: what a unit has in one of the chosen rows of a watched batch.

    Together, the rows are as they were. Alone, a piece has its row to itself: the tokens of other
    units are left out, those of nobody stay. So a unit whose tokens lie elsewhere than they were
    taken to be, or that depends on its neighbours, or on its place in the row, is another alone.

    Args:
        model: The model.
        watch: Of a forward pass for which :func:`why_not` has nothing to say.
    """

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        super().__init__(model, watch)
        assert watch.tokens is not None
        self._tokens = watch.tokens
        ids = watch.tokens[watch.chosen]
        self._width = int(ids.max()) + 1  # more than any unit of the batch
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        known, dense = (ids + rows * self._width)[ids >= 0].unique(return_inverse=True)
        self._known: list[int] = known.tolist()
        self._pieces = torch.full_like(ids, -1).masked_scatter_(ids >= 0, dense)

    @property
    def count(self) -> int:
        return len(self._known)

    @property
    def most(self) -> int:
        return self.count

    @property
    def stand_in(self) -> None:
        return None

    def unit(self, place: int) -> int:
        return self._known[place] % self._width

    def named(self, places: Sequence[int]) -> NamedUnits:
        if self._is_whole(places):
            return NamedUnits.numbered(self._pieces, self.count)
        row, kept = self._kept(places[0])
        own = self._pieces[row, kept] == places[0]
        numbers = torch.arange(len(places), device=own.device)[:, None]
        return NamedUnits.numbered(numbers.where(own, -1), len(places))

    def start(self, places: Sequence[int]) -> Start:
        watch = self.watch
        if self._is_whole(places):
            return super().start(range(len(watch.chosen)))
        row, kept = self._kept(places[0])
        args, kwargs = self._alone(watch.chosen[row], kept, len(places))
        leaves = self._outputs(args, kwargs)
        tensors, grads = self._of_scalars(leaves, len(places) / _units(self._tokens))
        for place, cotangent in watch.cotangents.items():
            own = self._of_tokens(cotangent[row], kept, self._pieces[row, kept] == places[0])
            leaf = output_at(leaves, place, cotangent.dim() - 1)
            tensors.append(leaf)
            grads.append(fitted(torch.cat([own] * len(places)).to(leaf.device), leaf))
        return tensors, grads

    def _share(self, places: Sequence[int]) -> float:
        rows = [self.watch.chosen[place] for place in places]
        return _units(self._tokens[rows]) / _units(self._tokens)

    def _is_whole(self, places: Sequence[int]) -> bool:
        return len(set(places)) == self.count

    def _kept(self, place: int) -> tuple[int, Tensor]:
        """The row of a piece, and the tokens that stay there when it is alone."""
        row = self._known[place] // self._width
        pieces = self._pieces[row]
        return row, ((pieces == place) | (pieces < 0)).nonzero().flatten()

    def _of_tokens(self, cotangent: Tensor, kept: Tensor, own: Tensor) -> Tensor:
        """Some tokens of a row's gradient ``[1, T, ...]`` or ``[T, ...]``, zero for nobody's."""
        dim = 0 if len(cotangent) == self._pieces.shape[1] else 1
        some = cotangent.index_select(dim, kept.to(cotangent.device))
        shape = [len(own) if d == dim else 1 for d in range(some.dim())]
        return some * own.to(some).view(shape)

    def _alone(self, row: int, kept: Tensor, copies: int) -> Any:
        """The model's arguments of these tokens of a row, several times."""
        inputs = self.watch.inputs
        args, kwargs = map_tensors(lambda t: self._cut(t, row, kept, copies), inputs)
        ends = torch.arange(copies + 1, device=kept.device) * len(kept)
        known = [p for p in (*args, kwargs) if isinstance(p, MutableMapping)]
        for part, key in itertools.product(known, _BOUNDARIES):
            if isinstance(part.get(key), Tensor):
                part[key] = ends.to(part[key])
        return args, kwargs

    def _cut(self, tensor: Tensor, row: int, kept: Tensor, copies: int) -> Tensor:
        tokens, own = self._pieces.shape[1], tensor.detach()
        of_rows = tensor.shape[:1] == (self.watch.rows.units,)
        if of_rows:
            own = own[[row] * copies]
        kept = kept.to(own.device)
        if _is_mask(tensor, tokens):
            own = own.index_select(-2, kept).index_select(-1, kept)
        elif tensor.shape[1:2] == (tokens,) and (of_rows or len(tensor) == 1):
            own = own.index_select(1, kept)
        return own.requires_grad_(tensor.requires_grad)


def why_not(watch: Watch) -> str:
    """Why pieces of a forward pass, whose gradients have come, cannot be run; empty if they can.

    It is found out before anything runs, which under FSDP2 all ranks do.
    """
    assert watch.tokens is not None
    tokens = watch.tokens.shape[1]
    if not watch.rows.batch_first:
        return _NOT_OF_TOKENS
    for place, cotangent in watch.cotangents.items():
        shape = tuple(cotangent.shape[1:])  # of a row
        if watch.dims[place] or (shape[:1] != (tokens,) and shape[:2] != (1, tokens)):
            return _NOT_OF_TOKENS
    for tensor in tensors_of(watch.inputs):
        if tensor.dim() == 3 and tensor.is_floating_point() and _is_mask(tensor, tokens):
            return "a mask of its tokens cannot be told from as many features of them"
    return "" if bool((watch.tokens[watch.chosen] >= 0).any()) else "its rows are nobody's"


def _units(ids: Tensor) -> int:
    return len(ids[ids >= 0].unique())


def _is_mask(tensor: Tensor, tokens: int) -> bool:
    return tensor.dim() > 2 and tensor.shape[-2:] == (tokens, tokens)
