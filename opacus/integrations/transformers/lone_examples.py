"""Before training: neither the row of an example nor its loss may depend on others of its batch.

Clipping bounds what an example adds by its own row, not what it does to the others'. Two ways lead
there that no hook in the model can see, since the batch comes like that:

- The collator mixes examples (mixup), or the transform of a data set of ``datasets``, which sees a
  whole draw. A row is compared with itself beside other examples.
- Rows are padded to the longest of the batch or draw, and the padding counts: a mean over all
  positions, a normalisation over time, attention without a mask. The loss of a short example by
  itself is compared with its loss beside a long one.

A few examples of the training set are looked at, without gradients. What cannot be compared
(a collator with random numbers of its own, padding that is not at the end) is let pass.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opacus.checkpoints.random_state import RandomState
from opacus.integrations.transformers.batches import LogicalBatch

logger = logging.getLogger(__name__)

_EXAMPLES, _SEEDS, _REPEATS = 8, 4, 6
# Of a loss in fp32, and where its parts may be of less precision.
EXACT, ROUGH = 1e-4, 3e-2

Rows = dict[str, Tensor]
Collate = Callable[[list[Any]], LogicalBatch]
Losses = Callable[[Mapping[str, Any]], Tensor]


def refuse_dependence(
    dataset: Any, collate: Collate, losses: Losses | None, tolerance: float
) -> None:
    """Refuse an example whose row or loss depends on others, among some of a training set.

    Args:
        dataset: The training set.
        collate: Of a draw, in physical batches.
        losses: ``[B]`` of a physical batch, without gradients; ``None``: padding cannot count.
        tolerance: Relative, of a loss.

    Raises:
        ValueError: It names what depends on other examples.
    """
    generators = RandomState(None)
    before = generators.state()
    try:
        last = len(dataset) - 1
        numbers = {i * last // (_EXAMPLES - 1) for i in range(_EXAMPLES)}  # spread over the set
        examples, collate = _as_drawn(dataset, collate, sorted(numbers))
        examples.sort(key=lambda e: _numbers(_seeded(collate, [e], 0)))
        refuse_mixing(collate, examples)
        if losses is not None:
            refuse_padding(collate, examples, losses, tolerance)
    finally:
        generators.restore(before)  # the run's random numbers are what they would have been


def _as_drawn(dataset: Any, collate: Collate, numbers: list[int]) -> tuple[list[Any], Collate]:
    """Examples, and what collates some; where a loader asks for all of a draw at once, so is here.

    Such examples are given by number, as a transform may make one in view of others.
    """
    fetch = getattr(dataset, "__getitems__", None)
    if fetch is None:
        return [dataset[i] for i in numbers], collate
    return [*numbers], lambda some: collate(copy.deepcopy(fetch(some)))


def refuse_mixing(collate: Collate, examples: list[Any]) -> None:
    """Refuse a collator that makes an example's row of other examples, too.

    Raises:
        ValueError: It names the entry of the batch.
    """
    if len(examples) < 3:
        return
    found = next(filter(None, (_mixed(collate, examples, seed) for seed in range(_SEEDS))), "")
    if found:
        raise ValueError(
            f"data_collator: {found} of an example changes with the other examples of its batch "
            "(mixup, there or in the data set's transform), so one example more changes the "
            "gradients of others, which clipping does not bound. Make each row of its own example "
            "alone"
        )


def _mixed(collate: Collate, examples: list[Any], seed: int) -> str:
    """The first entry whose row depends on other examples, with random numbers of this seed."""
    one, *_, other, longest = examples  # beside the longest nothing else sets the length

    def beside(example: Any) -> Rows:
        return _rows(_seeded(collate, [longest, example], seed), 0)

    first, second = beside(one), beside(other)
    found = _differing(first, second)
    for _ in range(_REPEATS if found else 0):  # or it has a generator of its own
        if _differing(first, beside(one)) or _differing(second, beside(other)):
            return ""
    return found


def refuse_padding(collate: Collate, examples: list[Any], losses: Losses, tolerance: float) -> None:
    """Refuse a loss that depends on how far an example is padded.

    Raises:
        ValueError: It says both losses.
    """
    short, long = examples[0], examples[-1]
    alone, together = _seeded(collate, [short], 0), _seeded(collate, [long, short], 0)
    place = _place_of(alone, together)
    if place is None:
        return
    try:
        one, again, padded = (
            float(losses(chunk)[at])
            for chunk, at, _ in (_place(alone, 0), _place(alone, 0), _place(together, place))
        )
    except Exception as error:  # of models that do not run so
        logger.info("padding was not looked at: %s: %s", type(error).__name__, error)
        return
    allowed = tolerance * (1 + abs(one))
    if abs(one - again) <= allowed < abs(one - padded):
        raise ValueError(
            f"the loss of an example depends on its padding: it is {one:.6g} alone and "
            f"{padded:.6g} beside a longer example. Its gradient then depends on others' lengths, "
            "which clipping does not bound. Likely causes: a mean over all positions, a batch "
            "without attention_mask, normalisation over time. Leave padding out of them, pad all "
            "examples to one length, or set per_device_train_batch_size=1"
        )


def _place_of(alone: LogicalBatch, together: LogicalBatch) -> int | None:
    """Where the example of a draw of one is in a draw of two; ``None`` if not padded there."""
    own = _rows(alone, 0)
    for place in (1, 0):  # some collators sort by length
        row = _rows(together, place)
        longer = any(v.shape != row[k].shape for k, v in own.items() if k in row)
        if longer and own.keys() == row.keys() and not _differing(own, row):
            return place
    return None


def _seeded(collate: Collate, examples: list[Any], seed: int) -> LogicalBatch:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return collate(copy.deepcopy(examples))


def _numbers(batch: LogicalBatch) -> int:
    values = (v for chunk in batch.chunks for v in chunk.values())
    return sum(v.numel() for v in values if isinstance(v, Tensor))


def _place(batch: LogicalBatch, place: int) -> tuple[Mapping[str, Any], int, int]:
    """The physical batch with an example of a draw, its place there, and how many are there."""
    for chunk, size in zip(batch.chunks, batch.sizes, strict=True):
        if place < size:
            return chunk, place, size
        place -= size
    raise IndexError(place)


def _rows(batch: LogicalBatch, place: int) -> Rows:
    """What a draw has of one example: a row, or two of a pair."""
    chunk, at, count = _place(batch, place)
    return {
        k: v[at::count]
        for k, v in chunk.items()
        if isinstance(v, Tensor) and v.dim() and len(v) in (count, 2 * count)
    }


def _differing(one: Rows, other: Rows) -> str:
    """The first entry in which rows differ, apart from what only one has at its ends."""
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=False))
        if a.dim() != b.dim() or not torch.equal(a[common], b[common]):
            return name
    return ""
