"""What runs of a model leave in the tensors that it holds.

A tensor that is written to past torch's operations, as a number says that the model has looked at,
or in a pass that no trail follows, seems to be nobody's. Where runs on two samples leave other
values in it, it is theirs, and later passes are followed accordingly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.isolation.left_values import left_values
from opacus.core.record.kept_values import held

# Elements of a tensor that is compared whether or not torch knows that it was written to.
MOST_COMPARED = 1 << 16

Place = tuple[str, int]  # what holds tensors, and the number of one in it
Versions = dict[Place, tuple[Tensor, int]]
# What tells values apart.
LeftTensors = dict[Place, Any]


def versions(model: nn.Module) -> Versions:
    """What modules hold in buffers, frozen parameters and attributes, and in which version."""
    found: Versions = {}
    for name, tensor in held(model):
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if trained or tensor.is_meta or tensor.is_quantized:  # the latter two have no numbers here
            continue
        number = next(n for n in itertools.count() if (name, n) not in found)
        found[name, number] = tensor, -1 if tensor.is_inference() else tensor._version
    return found


def left_tensors(model: nn.Module, before: Versions) -> LeftTensors:
    """What is small, and what a run has changed since then."""
    found: LeftTensors = {}
    for place, (tensor, version) in versions(model).items():
        old, then = before.get(place, (None, -1))
        small = tensor.numel() <= MOST_COMPARED and not isinstance(tensor, nn.Parameter)
        if small or tensor is not old or version != then:
            found[place] = tuple(tensor.shape), _bytes(tensor) if small else _sums(tensor)
    return found


def depend_on_samples(some: Iterable[LeftTensors]) -> set[str]:
    """Names of what holds tensors that are not alike in these, each of a run on another sample."""
    first, *others = some
    places = set(first).union(*others)
    return {name for name, n in places for x in others if x.get((name, n)) != first.get((name, n))}


class Remains:
    """What a run of a model has left in it.

    Args:
        model: The model.
        before: Its :func:`versions` before the run.

    Attributes:
        values: In attributes, of all sorts but tensors.
        tensors: That it holds.
    """

    def __init__(self, model: nn.Module, before: Versions) -> None:
        self.values = left_values(model)
        self.tensors = left_tensors(model, before)


def _bytes(tensor: Tensor) -> bytes:
    own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return own.view(torch.uint8).numpy().tobytes()


def _sums(tensor: Tensor) -> list[str]:
    """Without a copy of a large tensor, unless it has integers."""
    own = tensor.detach()
    if not (own.is_floating_point() or own.is_complex()):
        own = own.to(torch.float64)
    wide = torch.complex128 if own.is_complex() else torch.float64
    norms = [torch.linalg.vector_norm(own, p, dtype=wide) for p in (1, 2, 3)]
    return [str(x) for x in torch.stack([own.sum(dtype=wide), *norms]).tolist()]
