"""What a step is of: the items that a Poisson sampler drew.

Note [Items are samples]
    The accountant counts items of the data set: each is in a batch with the sample rate. What
    is clipped are the samples that the model saw. Where a collate function makes several rows of
    an item, or one row of several, an item may change the sum by more than C, or the step is
    of another batch than the one that was drawn.

    A loader of ours delivers batches in the order of the draws. A training loop may fetch
    batches ahead, leave some out, or split one; so the samples that steps have seen since
    the last match must be the size of *one* batch that was delivered and not used, and those
    delivered before it are taken as left out.

    A part of a logical batch may not be left out: whether its other samples take part would be
    decided by one of them (too long for the memory, or not finite), which would change the sum by
    more than C.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from opacus.core.privacy.delivered import Delivered

MOST_WAITING = 4096
PART_LEFT = (
    "a physical batch of this logical batch was left out, or refused: whether its other samples "
    "take part must not depend on one of them. Nothing of the logical batch was released; go on "
    "with the next one"
)


class Draws:
    """The batches of one Poisson sampler, from their delivery to the step.

    Attributes:
        started: Whether anything has been drawn.
        part: Number of the latest step's batch in its pass; -1 before the first.
        count: How many batches were delivered.
        delivered: What tells them apart.
    """

    def __init__(self) -> None:
        self.started = False
        self.part = -1
        self.count = 0
        self.delivered = Delivered()
        self._next_part = 0
        self._cycle: int | None = None
        self._logical = 0  # number of the next logical batch
        # (items, numbers of the logical batch: of all, and in its pass); the oldest go where nobody
        # takes steps
        self._waiting: deque[tuple[int, int, int]] = deque(maxlen=MOST_WAITING)
        self._parts: dict[int, int] = {}  # how many were delivered of logical batches
        self._left = False  # whether what waits is of a pass that was left
        self._seen = 0
        self._used: list[int] = []  # logical batches of the parts in the step so far

    @property
    def waits(self) -> bool:
        """Whether a batch was delivered that may yet be used."""
        return bool(self._waiting)

    def begin(self, part: int = 0, whole: bool = False, cycle: int | None = None) -> None:
        """A pass over the data begins.

        Args:
            part: Number of its first batch.
            whole: Whether each batch of the pass before must have been used in a step, once a step
                has been taken.
            cycle: After how many batches their numbers begin again.

        Raises:
            RuntimeError: Some have not.
        """
        self.started = True
        self._cycle = cycle
        self._next_part = part if cycle is None else part % cycle
        if not whole:
            return
        left = 0 if self._left else len(self._waiting)
        self._waiting.clear()
        if left and self.part >= 0:
            raise RuntimeError(
                f"{left} batches of the pass before were left without a step: with correlated "
                "noise each batch of the private loader must be followed by optimizer.step()"
            )

    def deliver(
        self, items: int, last: bool = True, number: int | None = None, batch: Any = None
    ) -> int | None:
        """A batch of so many items goes to the training loop.

        Args:
            items: Number of samples that it must have.
            last: Whether it is the last part of its logical batch.
            number: Of that, if a part of it was delivered before.
            batch: What is delivered.

        Returns:
            The same for the next part, ``None`` after the last.
        """
        if self._left:
            self._waiting.clear()
            self._left = False
        if number is None:
            number, self._logical = self._logical, self._logical + 1
        self._waiting.append((items, number, self._next_part))
        self.count += 1
        self.delivered.add(batch)
        self._parts[number] = self._parts.get(number, 0) + 1
        if len(self._parts) > MOST_WAITING:
            del self._parts[next(iter(self._parts))]
        self._next_part += last
        if self._cycle is not None:
            self._next_part %= self._cycle
        return None if last else number

    def keep_latest(self, count: int) -> None:
        """No step will be taken with batches before the latest `count`: left out, or refused."""
        while len(self._waiting) > count:
            self._waiting.popleft()

    def leave_pass(self, number: int | None) -> None:
        """The pass has been left early; steps of what was delivered of it are refused.

        Args:
            number: Of the logical batch whose rest will not come.
        """
        self._left = True
        if number is not None:
            self._parts[number] = 0

    def forget(self) -> None:
        """The step is not finished: what it has seen is dropped, delivered batches remain."""
        self._seen = 0
        self._used = []

    def check(self, samples: int, final: bool) -> None:
        """A step has taken in so many samples.

        Args:
            samples: Number of samples since the latest call.
            final: Whether they are the last ones of the step.

        Raises:
            RuntimeError: They are not the items that were drawn, of several draws, or not all of
                a draw.
        """
        seen = self._seen + samples
        place = next((k for k, (items, _, _) in enumerate(self._waiting) if items == seen), None)
        used = self._used if place is None else [*self._used, self._waiting[place][1]]
        if len(set(used)) > 1:
            raise RuntimeError(
                "several batches of the Poisson loader were added up for one step: a sample may "
                "be in more than one of them, so that it counts more than once. Step after each "
                "batch, and make the loader's batch_size larger for a larger batch; "
                "BatchMemoryManager splits it where memory is short. "
                "optimizer.reset_accumulation() drops what was added up"
            )
        if place is None and final and seen and self._waiting and not self._left:
            items = [items for items, _, _ in self._waiting]
            raise RuntimeError(
                f"the data loader drew {items[-1]} items for this batch, but the step saw {seen} "
                "samples: privacy is counted per item, but clipping was per sample. Let the "
                "collate function make exactly one row of each item (windows of one item: [items, "
                "windows, ...], averaged in the model; packed rows: pack before sampling, so that "
                "a row is an item), and pass whole batches of the private loader to the model"
            )
        self._seen, self._used = seen, used
        if place is not None:
            self.part = self._waiting[place][2]
            for _ in range(place + 1):
                self._waiting.popleft()
            self._seen = 0
        if final:
            self.forget()
            if used and self._parts.get(used[0], 0) != len(used):
                raise RuntimeError(PART_LEFT)
            if used:
                self._parts = {n: count for n, count in self._parts.items() if n > used[0]}
