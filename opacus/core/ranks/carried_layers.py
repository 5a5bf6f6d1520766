"""What of a part of the model is carried; see Note [Carriers] in `opacus.core.ranks.carried`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opacus.core.norms.kept import Kept
from opacus.core.platform.sizes import OWN_WEIGHT_TOKENS
from opacus.core.ranks.carrier_nodes import Target, with_rows, without_memory
from opacus.core.record.carriers import BOTH
from opacus.core.record.hooks import LayerHooks
from opacus.core.record.own_calls import Call, call_of
from opacus.core.record.own_weights import can_own, views_to_own
from opacus.core.record.passes import ForwardPass
from opacus.core.record.record import Use
from opacus.core.rules.base import Carried as CarriedForm
from opacus.core.sums.choice import Choice


class CarriedLayer(NamedTuple):
    """A layer that is carried.

    Attributes:
        hooks: Of the layer.
        form: What its carriers get.
        likes: One tensor without memory for each of them.
        dims: Of its output.
        choice: Of the planner, where gradients are stored; else the layer's record is kept.
        name: Of the layer.
        owners: Names in the model of the parameters whose gradients the carriers get.
        owns: The layer, if each sample may have a weight of its own.
        call: What may stand for its call, if it is a plain linear one.
    """

    hooks: LayerHooks
    form: CarriedForm
    likes: list[Tensor]
    dims: int
    choice: Choice | None
    name: str
    owners: tuple[str, ...]
    owns: nn.Module | None
    call: Call | None


class Carrying(NamedTuple):
    """What one part carries for inputs of some shapes.

    Attributes:
        layers: Of the part.
        names: Of the layers.
        choices: Of those whose gradients are stored, by layer.
        device: Where they are.
        calls: What may stand for the calls of plain linear ones.
    """

    layers: list[CarriedLayer]
    names: frozenset[str]
    choices: dict[str, Choice]
    device: torch.device
    calls: list[Call]


def carried_layer(
    hooks: LayerHooks, seen: ForwardPass, kept: Kept, choices: Mapping[str, Choice]
) -> CarriedLayer | None:
    """How a layer is carried that ran once, on the units' rows; ``None`` if it is not."""
    layer, name, uses = hooks.layer, hooks.layer.spec.name, seen.generation
    known = uses.uses.get(name) == 1 and name not in seen.moved
    ours = not (layer.shared or layer.unheld or layer.reader) and hooks.counts_rows_first()
    form, choice = layer.rule.carried(layer.spec), choices.get(name)
    if form is None or choice is None or not (known and ours):
        return None
    rows: list[Tensor | None] = []
    if choice.what == "store" and name in kept.layers:
        rows += [kept.formed.get(layer.owners[local]) for local in layer.spec.params]
    elif choice.what == "keep" and name not in kept.layers:
        form = BOTH
        records = [r for r in kept.held if r.spec.name == name and r.copied]
        rows += records[0].tensors if len(records) == 1 else []
        choice = None
    if not rows or not all(row is not None and len(row) == seen.batch for row in rows):
        return None
    likes = [without_memory(row) for row in rows if row is not None]
    (dims,) = [dims for own, dims in seen.kinds if own == name]
    owners = tuple([layer.owners[local] for local in layer.spec.params])
    eager = choice is not None and name not in uses.recomputed
    tokens = seen.tokens.get(name, -1) if eager else -1
    owns = layer.module if tokens >= OWN_WEIGHT_TOKENS and can_own(layer) else None
    call = call_of(hooks) if tokens >= 0 and owns is None else None
    return CarriedLayer(hooks, form, likes, dims, choice, name, owners, owns, call)


def targets_of(
    carrying: Carrying, forward_pass: ForwardPass, cast: torch.dtype | None, may_own: bool
) -> tuple[list[Target], list[Tensor]]:
    """Those of layers that are about to run, whose uses are noted, and models of the carriers."""
    batch, uses = forward_pass.batch, forward_pass.generation.uses
    targets: list[Target] = []
    likes: list[Tensor] = []
    for layer in carrying.layers:
        views = None
        if layer.choice is None:
            targets.append(_target(layer, forward_pass))
        else:
            uses[layer.name] = uses.get(layer.name, 0) + 1
            if may_own and layer.owns is not None:
                views = views_to_own(layer.owns, batch, cast)
            targets.append(layer.owners if views is None else layer.owners[0])
        if views is None:
            likes += [with_rows(like, batch) for like in layer.likes]
        else:
            likes.append(views)
    return targets, likes


def _target(carried: CarriedLayer, forward_pass: ForwardPass) -> Use:
    """That of a layer whose record is kept: its use."""
    layer = carried.hooks.layer
    use = Use(carried.hooks.recorder, layer, layer.spec, forward_pass, 0)
    use.register(with_rows(carried.likes[1], forward_pass.batch).shape, counted=True)
    return use
