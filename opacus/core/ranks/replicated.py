"""The same samples on all ranks: each rank measures and sums its share of the layers.

A rank adds the squared norms of its own layers, an all-reduce gives those of the whole
gradient, and each rank then sums the weighted gradients of its own layers; to the others it
contributes zeros. The sum over ranks is that of one process, neither W times as large nor
divided by W, and what is summed of a layer is what its rank measured, whatever random
numbers the other ranks drew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opacus.core.platform.profiling import ALL_REDUCE, STACK, part
from opacus.core.ranks.mesh import ModelRanks
from opacus.core.record.layers import Layer


class LayerShares:
    """Deals layers out to ranks, by the number of their parameters.

    Layers that share a parameter go to one rank. All ranks deal alike, without asking.

    Args:
        layers: The tapped layers, in the same order on all ranks.
        names: Names of all trainable parameters, in the same order on all ranks.
        ranks: Who shares the work.
        dtype: Type in which norms are summed.
    """

    def __init__(
        self, layers: Sequence[Layer], names: Sequence[str], ranks: ModelRanks, dtype: torch.dtype
    ) -> None:
        self.names = list(names)
        self.ranks = ranks
        self.dtype = dtype
        self.owned: set[str] = set()
        loads = [0] * ranks.count
        for group in sorted(_groups(layers), key=_size, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += _size(group)
            if rank == ranks.index:
                self.owned |= {owner for layer in group for owner in layer.owners.values()}

    def has(self, layer: Layer) -> bool:
        """Whether this rank measures and sums ``layer``."""
        return not self.owned.isdisjoint(layer.owners.values())

    def whole(
        self, norm_sq: Mapping[str, Tensor], batch: int, device: torch.device
    ) -> dict[str, Tensor]:
        """Squared norms ``[B]`` of all parameters from those of this rank's layers.

        One all-reduce for each axis of the mesh.
        """
        parts = torch.zeros(len(self.names), batch, dtype=self.dtype, device=self.ranks.device)
        with part(STACK):
            for row, name in zip(parts, self.names, strict=True):
                if name in norm_sq and name in self.owned:
                    row.copy_(norm_sq[name])
        with part(ALL_REDUCE):
            self.ranks.add(parts)
        return dict(zip(self.names, parts.to(device), strict=True))


def _groups(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Layers, those that share parameters together."""
    groups: list[tuple[set[str], list[Layer]]] = []
    for layer in layers:
        owners, members = set(layer.owners.values()), [layer]
        touching = [g for g in groups if not g[0].isdisjoint(owners)]
        for known, others in touching:
            owners |= known
            members = others + members
        groups = [g for g in groups if g not in touching] + [(owners, members)]
    return [members for _, members in groups]


def _size(group: Sequence[Layer]) -> int:
    sizes = {
        layer.owners[name]: torch.Size(layer.spec.shapes[name]).numel()
        for layer in group
        for name in layer.spec.params
    }
    return sum(sizes.values())
