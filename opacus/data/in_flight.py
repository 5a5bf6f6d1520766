"""Batches that a training loop has fetched, and the one that it works on.

Note [Left out, or fetched ahead]
    A step takes the signal of the oldest batch that waits for one. A loop that fetches ahead has as
    many batches without a step at each delivery; one that leaves a batch has one more from then on,
    and the oldest of them is the one that it left. But a loop that leaves its first batches looks
    like one that fetches as many ahead, until the model is given one of them: what it is given then
    is compared with what was delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.core.platform.trees import tensors_of

logger = logging.getLogger(__name__)

MOST_COMPARED = 16  # batches that are remembered until the model is given one


class InFlight:
    """The batches of a loader that have been delivered and have not met their step.

    Args:
        optimizer: The private optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._ahead: int | None = None  # how many the loop fetches before it works on one
        self._delivered = 0
        self._tensors: list[list[Tensor]] = []  # of the batches delivered, until that is known

    @property
    def _waiting(self) -> list[bool]:
        """Signals of the batches without a step, the oldest first."""
        return getattr(self._optimizer, "_step_skip_queue", [])

    def begin(self) -> None:
        """A pass over the loader begins."""
        self._delivered = 0
        self._tensors.clear()
        self._listen()

    def end(self) -> None:
        """The pass has ended, or been left."""
        self._tensors.clear()
        self._listen(False)

    def deliver(self, batch: Any) -> None:
        """A batch goes to the loop."""
        self._delivered += 1
        if self._ahead is None and self._delivered <= MOST_COMPARED:
            self._tensors.append(tensors_of(batch))

    def fetch(self) -> None:
        """The loop asks for another batch: forget those that it has left without a step."""
        waiting, cleared = self._waiting, getattr(self._optimizer, "_cleared_since_signal", False)
        if len(waiting) < self._delivered:  # a step has been taken in this pass
            if self._ahead is None or len(waiting) < self._ahead:
                self._know(len(waiting), certain=self._ahead is not None)
        elif cleared and self._delivered and self._ahead is None:  # one was worked on
            self._know(self._delivered - 1, certain=False)
        if self._ahead is not None:
            self._leave(len(waiting) - self._ahead)

    def _look_at_inputs(self, inputs: Any) -> None:
        """The model is given these, in training: the loop works on one of the batches."""
        count = len(self._tensors)
        if self._ahead is not None or count == 0 or len(self._waiting) != count:
            return
        place = 0 if count == 1 else _place_of(inputs, self._tensors)
        if place is not None:
            self._know(count - 1 - place)
            self._leave(place)

    def _know(self, ahead: int, certain: bool = True) -> None:
        if ahead and not certain:
            logger.warning(
                "The training loop is taken to fetch %d batches ahead, as the model is given none "
                "of them as it was delivered. If the loop has left out the first %d of this pass "
                "instead, without a step, its steps are not of the batches that were drawn.",
                ahead,
                ahead,
            )
        self._ahead = ahead
        self.end()

    def _leave(self, count: int) -> None:
        """The oldest of the batches that wait were left."""
        for _ in range(count):
            logger.warning(
                "A physical batch was left without optimizer.step(): nothing of its logical batch "
                "will be released. Whether its other samples take part must not depend on one."
            )
            self._optimizer.leave_part()

    def _listen(self, wanted: bool = True) -> None:
        """Let the model tell what it is given, if it can and that is not known."""
        isolation = getattr(self._optimizer, "isolation", None)
        if isolation is not None:
            listeners = isolation.recorder.passes.given
            if self._look_at_inputs in listeners:
                listeners.remove(self._look_at_inputs)
            if wanted and self._ahead is None:
                listeners.append(self._look_at_inputs)


def _place_of(inputs: Any, batches: Sequence[Sequence[Tensor]]) -> int | None:
    """The one batch that holds a tensor which is among the inputs."""
    for own in tensors_of(inputs):
        found = [k for k, batch in enumerate(batches) if any(_same(own, t) for t in batch)]
        if len(found) == 1:
            return found[0]
    return None


def _same(own: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, but for device and dtype."""
    if not (_is_plain(own) and _is_plain(other) and own.shape == other.shape):
        return False
    return torch.equal(own.detach(), other.detach().to(own.device, own.dtype))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
