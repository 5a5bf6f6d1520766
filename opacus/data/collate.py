"""Collating batches that may be empty, as those of Poisson sampling may."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from opacus.data.empty_batch import blank_batch

logger = logging.getLogger(__name__)

CollateFn = Callable[[list[Any]], Any]


def shape_safe(x: Any) -> tuple[int, ...]:
    """The shape of `x`, or `()` if it has none."""
    return getattr(x, "shape", ())


def dtype_safe(x: Any) -> torch.dtype | type:
    """The dtype of `x`, or its type if it has none."""
    return getattr(x, "dtype", type(x))


class CollateFnWithEmpty:
    """A collate function that also knows what an empty batch looks like.

    Other batches go through `collator_fn` unchanged. A batch of no samples gets the structure of
    the others, with size 0 in the batch dimension (`opacus.data.empty_batch` has the rules). The
    structure is learned when it is first needed, from one sample that is collated once and twice:
    the first of `dataset`, or else the first that has passed through. Learning leaves the global
    random state of torch as it was. Each worker process learns for itself.

    Guarantee: an empty batch carries nothing of any sample's content.

    Args:
        collator_fn: the collate function to wrap; `None` returns the list of samples as it is.
        batch_first: the batch dimension of collated tensors is the first (`True`) or the second.
        rand_on_empty: return a made-up batch of one sample, random zeros and ones, instead of an
            empty one, for models that cannot run on no samples. The made-up sample is clipped and
            summed like a real one. Its gradient depends on no data, so the privacy guarantee
            holds, but it is an error in the update that an empty batch would not make.
        sample_empty_shapes: shapes of a flat list of tensors to fall back on if there is neither
            a data set nor a first sample yet.
        dtypes: their dtypes.
        dataset: map-style data set whose first sample shows the structure.
    """

    def __init__(
        self,
        collator_fn: CollateFn | None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
        dtypes: Sequence[torch.dtype | type] | None = None,
        *,
        dataset: Dataset[Any] | None = None,
    ) -> None:
        self.wrapped_collator_fn = collator_fn
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        self.sample_empty_shapes = sample_empty_shapes
        self.dtypes = dtypes
        self.dataset = dataset
        self.first_batch: Any = None  # blank; None until an empty batch has been asked for
        self._seen_samples = False
        self._first_sample: Any = None  # kept only where there is no data set

    def __call__(self, batch: list[Any]) -> Any:
        """Collates `batch`, a list of samples that may be empty."""
        if len(batch) == 0:
            return self._empty_batch()
        if not self._seen_samples:
            self._seen_samples = True
            if self.dataset is None:
                self._first_sample = copy.deepcopy(batch[0])  # collate functions may change theirs
        return self._collate(batch)

    def _collate(self, batch: list[Any]) -> Any:
        return batch if self.wrapped_collator_fn is None else self.wrapped_collator_fn(batch)

    def _empty_batch(self) -> Any:
        if self.first_batch is None:
            if not self._seen_samples and self.dataset is None:
                return self._fallback()
            one, two = self._small_batches()
            self.first_batch = self._blank(one, two)
        # A copy, because whoever gets it may change it.
        return self._blank(self.first_batch, self.first_batch)

    def _blank(self, one: Any, two: Any) -> Any:
        return blank_batch(one, two, batch_first=self.batch_first, random=self.rand_on_empty)

    def _small_batches(self) -> tuple[Any, Any]:
        """A batch of one sample and a batch of two."""
        with torch.random.fork_rng(devices=[]):
            one = self._collate([self._sample()])
            two = self._collate([self._sample(), self._sample()])
        return one, two

    def _sample(self) -> Any:
        return copy.deepcopy(self._first_sample) if self.dataset is None else self.dataset[0]

    def _fallback(self) -> list[Any]:
        logger.warning(
            "First batch is empty, and there is no data set to learn its structure from. "
            "A list of tensors is used; pass `dataset` if the other batches are not like that."
        )
        shapes, dtypes = self.sample_empty_shapes or (), self.dtypes or ()
        kinds: Any = zip(shapes, dtypes, strict=False)
        return [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]


def wrap_collate_with_empty(
    *,
    collate_fn: CollateFn | None,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype | type] | None = None,
    dataset: Dataset[Any] | None = None,
) -> CollateFnWithEmpty:
    """Makes `collate_fn` work on empty batches; see `CollateFnWithEmpty` for the arguments."""
    if isinstance(collate_fn, CollateFnWithEmpty):
        collate_fn = collate_fn.wrapped_collator_fn
    return CollateFnWithEmpty(
        collate_fn,
        batch_first=batch_first,
        rand_on_empty=rand_on_empty,
        sample_empty_shapes=sample_empty_shapes,
        dtypes=dtypes,
        dataset=dataset,
    )
