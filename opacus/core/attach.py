"""Finds the layers to tap, with the rule of each and the owners of its parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from opacus.core.recorder import Layer
from opacus.core.rules import RULES, LayerRule, rule_for
from opacus.core.spec import LayerSpec, make_spec


def layers_of(model: nn.Module, choose: Callable[[nn.Module], LayerRule] = rule_for) -> list[Layer]:
    """One :class:`Layer` for each module that directly owns a trainable parameter.

    Args:
        model: The model; modules that appear twice are listed once.
        choose: Picks the rule of a module.
    """
    owner = {id(p): name for name, p in model.named_parameters()}
    layers = []
    for name, module in model.named_modules():
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        rule = choose(module)
        try:
            spec = make_spec(name, module, rule.options(module))
        except ValueError as error:
            raise ValueError(f"layer '{name}' ({type(module).__name__}): {error}") from None
        owners = {p: owner[id(module._parameters[p])] for p in spec.params}
        written = RULES.get(spec.kind, rule)  # what the layer is, whichever rule it gets
        batch_first = written.batch_leads or _own_layout(module, spec)
        features = written.features(spec)
        layers.append(Layer(module, spec, rule, owners, batch_first=batch_first, features=features))
    _mark_shared(layers)
    return layers


def _own_layout(module: nn.Module, spec: LayerSpec) -> bool | None:
    """What a layer says of itself: whether its batch comes first."""
    own = spec.options.get("batch_first", getattr(module, "batch_first", None))
    return own if isinstance(own, bool) else None


def _mark_shared(layers: list[Layer]) -> None:
    holders: dict[str, set[str]] = {}
    for layer in layers:
        for owner in layer.owners.values():
            holders.setdefault(owner, set()).add(layer.spec.name)
    for layer in layers:
        layer.shared = any(len(holders[owner]) > 1 for owner in layer.owners.values())
