"""Which layers exchange their per-sample gradients (``exchange.py``): ranks decide it together.

Before each backward pass the hosts of all ranks that may hold different samples compare
notes, in one all-reduce of a few numbers over a gloo group: nothing waits for a GPU. A rank
says how many samples it has, how much memory, which layers its forward pass ran, and which
of them it would rather not exchange. Where the forward passes differ (a branch that only some
batches take), nothing is exchanged in this pass.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from opacus.core.exchange import Exchange, Part
from opacus.core.planner import Planner
from opacus.core.rates import Link, link_rate
from opacus.core.recorder import Layer
from opacus.core.reduction import Shards, shards_of

VARIABLE = "OPACUS_STORED_SHARDS"
CHOICES = ("off", "auto", "always")
# Stands for no limit of memory.
NO_LIMIT = 1 << 62


def stored_shards_from_environment() -> str:
    """What ``OPACUS_STORED_SHARDS`` says; by default ``"off"``.

    Raises:
        ValueError: It is none of the choices.
    """
    return check_choice(os.environ.get(VARIABLE, "off"), VARIABLE)


def check_choice(value: str, what: str = "stored_shards") -> str:
    """``value``, if it is a choice.

    Raises:
        ValueError: It is not.
    """
    if value not in CHOICES:
        raise ValueError(f"{what} must be one of {', '.join(CHOICES)}, got {value!r}")
    return value


class StoredShards:
    """Plans the exchanges of each backward pass, the same on all ranks.

    Args:
        layers: The tapped layers.
        parameters: All parameters by name, sharded by FSDP2.
        sent_dtypes: Type in which the layers of a parameter compute, where it is not the
            parameter's: per-sample gradients are sent, measured and held in it.
        reduce_dtypes: Type in which gradients are summed over replicas.
        choice: ``"off"``; ``"auto"``: the layers for which every rank finds it faster;
            ``"always"``: all layers that can. The same on all ranks.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        parameters: Mapping[str, nn.Parameter],
        sent_dtypes: Mapping[str, torch.dtype],
        reduce_dtypes: Mapping[str, torch.dtype],
        choice: str = "off",
    ) -> None:
        self.layers = layers
        self.parameters = parameters
        self.sent_dtypes = sent_dtypes
        self.reduce_dtypes = reduce_dtypes
        self.choice = check_choice(choice)
        # Whether a sample has one clipping factor for all parameters.
        self.flat = True
        # How often something has been communicated.
        self.collectives = 0
        self._by_name = {layer.spec.name: layer for layer in layers}
        self._known: dict[tuple[str, ...], list[Part]] = {}

    def begin(
        self, rows: int, uses: Mapping[str, int], planner: Planner, device: torch.device
    ) -> Exchange | None:
        """The exchanges of the backward pass that is about to start; ``None``: there are none.

        A collective of all ranks along the data axes of the model, unless the choice is ``"off"``.

        Args:
            rows: Number of samples on this rank.
            uses: How often each layer has run in the forward pass, in the order of its first use.
            planner: What this rank would do, and its memory.
            device: Of the losses.
        """
        if self.choice == "off" or not self.flat or not self.layers:
            return None
        mesh, axis = self._mesh()
        if mesh.size(axis) == 1:
            return None
        group = _group(tuple(dist.get_process_group_ranks(mesh.get_group(axis))), None)
        hosts = _group(tuple(sorted(mesh.mesh.flatten().tolist())), "gloo")
        if planner.link is None:
            planner.link = Link(dist.get_world_size(group), link_rate(group, device))
        refused = [int(not self._wanted(layer, planner)) for layer in self.layers]
        code = _code([(n, count, self._trainable(n)) for n, count in uses.items()])
        budget = NO_LIMIT if planner.budget_bytes is None else planner.budget_bytes
        words = [rows, -budget, code, -code, *refused]
        said = torch.tensor(words, dtype=torch.int64, device="cpu")
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=hosts)
        self._count()
        batch, budget, most, least, *refused = said.tolist()
        if batch == 0 or most != -least:
            return None
        agreed = [layer for layer, no in zip(self.layers, refused, strict=True) if not no]
        parts = self._within(-budget, batch, self._in_order(agreed, uses), planner)
        return Exchange(parts, batch, rows, group, device, self._count) if parts else None

    def _count(self) -> None:
        self.collectives += 1

    def _wanted(self, layer: Layer, planner: Planner) -> bool:
        return self.choice == "always" or planner.prefers_exchange(layer.spec.name)

    def _in_order(self, layers: Sequence[Layer], uses: Mapping[str, int]) -> list[list[Part]]:
        """What can be exchanged, by layer, in the order of the backward pass."""
        by_name = {layer.spec.name: layer for layer in layers}
        found = [by_name[n] for n in reversed(list(uses)) if n in by_name and uses[n] == 1]
        return [parts for layer in found if (parts := self._parts(layer))]

    def _within(
        self, budget: int, batch: int, layers: Sequence[list[Part]], planner: Planner
    ) -> list[Part]:
        """As many layers as fit into the memory that all ranks have."""
        taken: list[Part] = []
        used = 0
        for parts in layers:
            size = sum(batch * part.shards.elements * part.sent.itemsize for part in parts)
            if used + size <= budget:
                taken += parts
                used += size
        planner.held_bytes += used
        return taken

    # --- what is known of a layer without asking ---

    def _parts(self, layer: Layer) -> list[Part]:
        key = (layer.spec.name, *self._trainable(layer.spec.name))
        if key not in self._known:
            self._known[key] = self._find_parts(layer, key[1:])
        return self._known[key]

    def _find_parts(self, layer: Layer, names: Sequence[str]) -> list[Part]:
        """Its parameters; none if its gradients cannot be exchanged.

        Shared parameters need the sum over their layers before the norm. Rules that run the
        layer again are left to the way in which these have always been stored.
        """
        rule = layer.rule
        owners = [layer.owners[local] for local in names]
        if layer.shared or rule.needs_parameters or not rule.norm_is_local:
            return []
        if len(set(owners)) < len(owners):
            return []
        parts = [self._part(layer, local) for local in names]
        mesh, _ = self._mesh()
        owned: list[Any] = [self.parameters[owner] for owner in owners]
        same = all(parameter.device_mesh == mesh for parameter in owned)
        return parts if same and len({(p.sent, p.summed) for p in parts}) == 1 else []

    def _part(self, layer: Layer, local: str) -> Part:
        name = layer.owners[local]
        parameter: Any = self.parameters[name]
        shards: Shards = shards_of(name, parameter, self.reduce_dtypes.get(name, torch.float32))
        wide = parameter.dtype == torch.float64
        return Part(
            name=name,
            local=local,
            layer=layer.spec.name,
            shards=shards,
            even=shards.dim == 0 and shards.elements == parameter.numel(),
            sent=parameter.dtype if wide else self.sent_dtypes.get(name, parameter.dtype),
            summed=parameter.dtype if shards.replicas is None else shards.dtype,
        )

    def _trainable(self, layer: str) -> tuple[str, ...]:
        return self._by_name[layer].trainable_now().params if layer in self._by_name else ()

    def _mesh(self) -> tuple[Any, int]:
        """The mesh of the model, and the axis of it that shards."""
        layer = self.layers[0]
        first: Any = self.parameters[layer.owners[layer.spec.params[0]]]
        return first.device_mesh, first.device_mesh.ndim - 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}


def _code(facts: object) -> int:
    """A number that differs where ``facts`` do."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=7).digest(), "big")


def _group(ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup:
    return _groups_of(dist.group.WORLD, ranks, backend)


@functools.cache
def _groups_of(world: Any, ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup:
    """A group of our own, made once; its ranks call this together."""
    group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
