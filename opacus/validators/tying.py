"""Keeps tied parameters tied when modules of a model are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_multihead_attention import OWN_NAMES

# Inner module of a replaced one -> the replacement, and what precedes its names there.
Moved = Mapping[nn.Module, tuple[nn.Module, str]]


@dataclass(frozen=True)
class Place:
    """Where a parameter is found in a model.

    Attributes:
        module: Module that owns it.
        name: Its name in that module.
        shown: Its name in the model, for messages.
    """

    module: nn.Module
    name: str
    shown: str


class Ties:
    """Which places in ``model`` hold one and the same parameter."""

    def __init__(self, model: nn.Module) -> None:
        places: dict[nn.Parameter, list[Place]] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                shown = f"{path}.{name}" if path else name
                places.setdefault(parameter, []).append(Place(module, name, shown))
        self._groups = [group for group in places.values() if len(group) > 1]

    def restore(self, replaced: Mapping[nn.Module, nn.Module]) -> None:
        """Tie again what was tied, where ``replaced`` maps old modules to new ones.

        Raises:
            ValueError: A replacement splits a parameter that is tied to one left whole.
        """
        moved = {
            inner: (new, f"{path}." if path else "")
            for old, new in replaced.items()
            for path, inner in old.named_modules()
        }
        for group in self._groups:
            # What was not moved keeps its parameter, the others take it over.
            first, *others = sorted(group, key=lambda place: place.module in moved)
            for other in others:
                if other.module in moved:
                    _tie(first, other, moved)


def _tie(first: Place, other: Place, moved: Moved) -> None:
    """Put the parameters that are now at ``first`` where those of ``other`` are."""
    kept, changed = _pieces(first, moved), _pieces(other, moved)
    if not kept or not changed:
        return  # the replacement has no such parameter
    if [p.shape for _, _, p in kept] != [p.shape for _, _, p in changed]:
        raise ValueError(
            f"'{first.shown}' and '{other.shown}' are one parameter, but their modules are "
            "replaced by ones that cannot share it; untie them first, or exchange the modules "
            "by hand"
        )
    for (_, _, parameter), (module, name, _) in zip(kept, changed, strict=True):
        setattr(module, name, parameter)


def _pieces(place: Place, moved: Moved) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where the parameter is now: module, name and value of each piece of it."""
    if place.module in moved:
        root, prefix = moved[place.module]
        name = prefix + place.name
        names = OWN_NAMES.get(name, (name,)) if isinstance(root, DPMultiheadAttention) else (name,)
    else:
        root, names = place.module, (place.name,)
    pieces = []
    for qualified in names:
        path, _, local = qualified.rpartition(".")
        owner = root.get_submodule(path)
        parameter = owner._parameters.get(local)
        if parameter is not None:
            pieces.append((owner, local, parameter))
    return pieces
