"""What a model keeps of a batch: in a later one it is of no single sample.

Averages that a module updates in its forward pass, queues of earlier samples, states that go from
batch to batch: the gradients of later samples depend on them, and with them on the samples of this
batch, which no clipping bounds. At the end of passes that are followed, what is kept is looked for
in buffers, parameters (codebooks) and attributes; in later ones it is taken for what it is. So it
is in runs of the isolation check, which a pass that took another course gets at once: a queue that
is read for the first time makes one.

Note [One sample]
    Whose the rows of one sample are needs no trail, but what the model keeps of it does: else the
    next sample would read it, as in physical batches of one. So a few of these passes are
    followed for this alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.attributes import attributes_of
from opacus.core.platform.trees import tensors_of
from opacus.core.record.trail.answers import INTERVAL, LOOK_AGAIN
from opacus.core.record.trail.followable import can_follow
from opacus.core.record.trail.labels import Lost
from opacus.core.record.trail.mode import Trail
from opacus.core.record.trail.op import is_plain

# Of a tensor, and of all in a place.
Version = tuple[weakref.ref[Tensor], int]
Versions = list[Version]


class KeptValues:
    """Tensors that a model keeps from one batch to the next.

    Attributes:
        places: Where they are, with their names.
        carried: Names of those that are as an earlier batch has left them, as a pass begins.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()  # names of what holds them
        self._batch: weakref.ref[Any] | None = None  # in which they were found
        self.places: list[tuple[str, Any, str]] = []  # where these are
        self._left: dict[str, Versions] = {}
        self._ran: weakref.ref[Any] | None = None  # the batch that has left them
        self.carried: set[str] = set()
        self._passes = 0  # on one sample
        self.trail: Trail | None = None  # of the running one of these, if it is followed

    def arrive(self, batch: object) -> None:
        """A pass begins, followed or not."""
        same = self._ran is not None and self._ran() is batch
        now = {} if same else self._versions()
        self.carried = {name for name in now if _same(now[name], self._left.get(name, []))}
        self._ran = weakref.ref(batch)

    def leave(self) -> None:
        """It is over."""
        self._left = self._versions()

    def _versions(self) -> dict[str, Versions]:
        found: dict[str, Versions] = {}
        for name, own, key in self.places:
            tensors = [t for t in tensors_of(own.get(key)) if not t.is_inference()]
            if tensors:
                found[name] = [(weakref.ref(t), t._version) for t in tensors]
        return found

    def aside(self) -> KeptValues | None:
        """For runs on the side, in which all that is carried is taken for what it is."""
        if not self.carried:
            return None
        other = KeptValues()
        other._known = set(self.carried)
        return other

    def begin(self, model: nn.Module, trail: Trail, batch: object) -> None:
        """A pass is followed: what is known to be kept is not of its samples.

        Args:
            model: Runs now.
            trail: Follows it.
            batch: Stands for what it runs on: the same object in all passes on one batch.
        """
        if not self._known or (self._batch is not None and self._batch() is batch):
            return
        for name, tensor in held(model):
            if name in self._known and not _is_reset(tensor, trail):
                reason = f"{name} holds what was computed from samples of an earlier batch, of "
                reason += "which a later one may know nothing"
                trail.mark(tensor, Lost(reason, mixed=True))

    def end(self, model: nn.Module, trail: Trail, batch: object) -> None:
        """The pass is over: note what of it is kept."""
        self._batch = weakref.ref(batch)
        self.note(model, {n for n, own in held(model) if trail.follows_from_data(own)})

    def note(self, model: nn.Module, names: set[str]) -> None:
        """What these hold was found to depend on samples."""
        if not names <= self._known:
            self._known |= names
            self.places = [place for place in _places(model) if place[0] in self._known]

    def begin_alone(self, model: nn.Module, inputs: Any, batch: object, dim: int) -> None:
        """A pass on one sample starts; see Note [One sample]."""
        due = self._passes + 1 in (1, *LOOK_AGAIN) or (self._passes + 1) % INTERVAL == 0
        if not due or not can_follow(model, inputs):
            self._passes += 1
            return
        self.trail = Trail(tensors_of(inputs), 1, dim)
        self.begin(model, self.trail, batch)
        self.trail.__enter__()

    def end_alone(self, model: nn.Module | None, output: Any, batch: object) -> None:
        """One that is followed is over, with this output of the model; ``None`` if it failed.

        Raises:
            ValueError: The output is made of what the model keeps of earlier samples.
        """
        trail, self.trail = self.trail, None
        assert trail is not None
        trail.__exit__(None, None, None)
        if output is None or model is None or batch is None:
            return
        with trail.aside():
            self.end(model, trail, batch)
        trail.check_alone(tensors_of(output))
        self._passes += 1  # after a refusal the next one is followed, too

    def __getstate__(self) -> dict[str, Any]:
        return vars(KeptValues())


def _is_reset(tensor: Tensor, trail: Trail) -> bool:
    """Whether nothing is left of a batch: a program sets states to zero for the next one."""
    with trail.aside():
        return not bool(tensor.any())


def _same(one: Versions, two: Versions) -> bool:
    """Whether these are the same tensors, unchanged."""
    pairs = zip(one, two, strict=False)
    return len(one) == len(two) and all(a() is b() and v == w for (a, v), (b, w) in pairs)


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in buffers, parameters and attributes, also in lists, tuples and dictionaries."""
    for label, own, name in _places(model):
        for tensor in tensors_of(own[name]):
            if is_plain(tensor) and tensor.layout is torch.strided:
                yield label, tensor


def _places(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """What may hold tensors: as what and under which name, in which dictionary."""
    for path, module in model.named_modules():
        parts = {"buffer": module._buffers, "parameter": module._parameters}
        for kind, own in parts.items():
            yield from (
                (_label(kind, path, name), own, name) for name, v in own.items() if v is not None
            )
        for name, value in attributes_of(module).items():
            if value is not None and not isinstance(value, (bool, int, float, str, nn.Module)):
                yield _label("attribute", path, name), vars(module), name


def _label(kind: str, path: str, name: str) -> str:
    return f"{kind} '{path}.{name}'".replace("'.", "'")
