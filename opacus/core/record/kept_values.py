"""What a model keeps of a batch: in a later one it is of no single sample.

Averages that a module updates in its forward pass, queues of earlier samples, states that go from
batch to batch: the gradients of later samples depend on them, and with them on the samples of this
batch, which no clipping bounds. At the end of passes that are followed, what is kept is looked for
in buffers, parameters (codebooks) and attributes; in later ones it is taken for what it is.

Note [One sample]
    Whose the rows of one sample are needs no trail, but what the model keeps of it does: else the
    next sample would read it, as in physical batches of one. So a few of these passes are
    followed for this alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
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


class KeptValues:
    """Tensors that a model keeps from one batch to the next."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # names of what holds them
        self._batch: weakref.ref[Any] | None = None  # in which they were found
        self._passes = 0  # on one sample
        self.trail: Trail | None = None  # of the running one of these, if it is followed

    def begin(self, model: nn.Module, trail: Trail, batch: object) -> None:
        """A pass is followed: what is known to be kept is not of its samples.

        Args:
            model: Runs now.
            trail: Follows it.
            batch: Stands for what it runs on: the same object in all passes on one batch.
        """
        if not self._known or (self._batch is not None and self._batch() is batch):
            return
        for name, tensor in held_tensors(model):
            if name in self._known and not _is_reset(tensor, trail):
                reason = f"{name} holds what was computed from samples of an earlier batch, of "
                reason += "which a later one may know nothing"
                trail.mark(tensor, Lost(reason, mixed=True))

    def end(self, model: nn.Module, trail: Trail, batch: object) -> None:
        """The pass is over: note what of it is kept."""
        self._batch = weakref.ref(batch)
        self.note(name for name, own in held_tensors(model) if trail.follows_from_data(own))

    def note(self, names: Iterable[str]) -> None:
        """Tensors of these names hold what was computed from samples."""
        self._known.update(names)

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


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in buffers, parameters and attributes, also in lists, tuples and dictionaries."""
    for path, module in model.named_modules():
        parts = {
            "buffer": module._buffers,
            "parameter": module._parameters,
            "attribute": attributes_of(module),
        }
        for kind, values in parts.items():
            for name, value in values.items():
                if value is None or isinstance(value, (bool, int, float, str, nn.Module)):
                    continue
                for tensor in tensors_of(value):
                    if is_plain(tensor) and tensor.layout is torch.strided:
                        yield f"{kind} '{path}.{name}'".replace("'.", "'"), tensor
