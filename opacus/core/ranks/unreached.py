"""Lets ranks take different paths through a model without waiting for each other.

FSDP2 reduces the gradients of a unit in one call, of those parameters that have one. A
branch that only some ranks' batches take (an expert, a second modality) would give that
call another size on each rank: it would hang, or add up the wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import fsdp_state
from opacus.core.record.layers import Layer


class Unreached:
    """Gives a zero gradient to the parameters that the batch of this rank did not use.

    No rank asks another one: each reduces all trainable parameters of every unit that its
    backward pass reaches. Costs nothing where every layer was used.

    Args:
        model: The model, sharded by FSDP2.
        layers: Its tapped layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._units = fsdp_units(model)
        self._owners = {owner for layer in layers for owner in layer.owners.values()}
        self._waiting: dict[int, list[tuple[Layer, str]]] = {}

    def start(self, reached: AbstractSet[str]) -> None:
        """Before the sum pass.

        Args:
            reached: Names of the parameters that the norm pass has seen.
        """
        self._waiting = {}
        if self._owners <= reached:
            return
        for layer in self._layers:
            for local in layer.trainable_now().params:
                if layer.owners[local] not in reached:
                    unit = self._units[id(layer.module)]
                    self._waiting.setdefault(unit, []).append((layer, local))

    def rest(self) -> None:
        """In the coming sum pass FSDP2 reduces nothing."""
        self._waiting = {}

    def fill(self, layer: Layer) -> None:
        """In the sum pass, when ``layer`` got its gradient: its unit is unsharded now."""
        if not self._waiting:
            return
        for other, local in self._waiting.pop(self._units[id(layer.module)], ()):
            parameter = other.parameter(local)
            if parameter is not None and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": {}}


def fsdp_units(model: nn.Module) -> dict[int, int]:
    """``id`` of a module -> number of the FSDP2 unit that its own parameters belong to."""
    found: dict[int, int] = {}
    states: list[Any] = []
    _number(model, -1, found, states)
    return found


def _number(module: nn.Module, unit: int, found: dict[int, int], states: list[Any]) -> None:
    if is_fsdp(module):
        # Modules that were sharded together, as a list, have one state.
        state = fsdp_state(module) or module
        if state not in states:
            states.append(state)
        unit = states.index(state)
    if id(module) not in found:
        found[id(module)] = unit
        for child in module.children():
            _number(child, unit, found, states)
