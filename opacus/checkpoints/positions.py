"""The position of training in a pass over a data loader, and how training resumes there.

A loader may have drawn batches that have not been trained on yet, so its own position says little.
The position is counted in batches that steps were taken with. To go on, the sampler's pass is
replayed from the state of its generators at the start of the pass, without loading data, and the
batches that were used are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from opacus.checkpoints.random_state import set_torch_state, torch_state
from opacus.data.sharding import ShardedBatchSampler
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import POISSON, SystemGenerator

# Samplers whose global batches do not depend on the number of ranks.
_WHOLE = (*POISSON, ShardedBatchSampler)


@dataclass
class _Resumption:
    """How the next pass starts.

    Attributes:
        used: batches to leave out.
        start: state of the generators that the pass started with; `None` draws a new pass.
        settle: sets the random state that training goes on with.
    """

    used: int
    start: dict[str, Any] | None
    settle: Callable[[], None]


class LoaderPosition:
    """Follows the passes over a loader, which can then start in the middle.

    The loader's batch sampler gets a class derived from its own, in place, as FSDP2 does with
    modules: the loader, and `BatchMemoryManager`'s loaders over it, use it like before.

    Args:
        data_loader: loader of (logical) batches.
        noise: generator of the noise, if it has one.

    Attributes:
        epoch: number of the pass under way, or of the next one if none is.
        used: batches of it that steps were taken with.
        under_way: whether a pass has been started and not been ended.

    Raises:
        ValueError: the loader does not draw batches of indices.
    """

    def __init__(self, data_loader: DataLoader[Any], noise: torch.Generator | None) -> None:
        sampler: Any = data_loader.batch_sampler
        if sampler is None:
            raise ValueError(
                "data_loader must draw batches of indices: its data set must not be iterable, and "
                "its batch_size must not be None"
            )
        self.epoch, self.used, self.under_way = 0, 0, False
        self._start: dict[str, Any] | None = None
        self._repeats = False  # whether the sampler has the key of the saved run
        self._next: _Resumption | None = None
        is_split = isinstance(sampler, BatchSplittingSampler)
        self._sampler: Any = sampler.sampler if is_split else sampler
        self._loader_generator = data_loader.generator
        self._noise = noise
        _make_resumable(self._sampler, self)

    @property
    def _is_poisson(self) -> bool:
        return isinstance(self._sampler, POISSON)

    # --- generators ---

    @property
    def sources(self) -> list[torch.Generator]:
        """Generators that the sampler draws from."""
        inner = getattr(self._sampler, "batch_sampler", None)
        outer, innermost = getattr(self._sampler, "sampler", None), getattr(inner, "sampler", None)
        owners = (self._sampler, outer, inner, innermost)
        found: list[torch.Generator] = []
        for owner in owners:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is f for f in found):
                found.append(generator)
        return found

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators that the loader and its sampler draw from."""
        own, sources = self._loader_generator, self.sources
        if own is None or any(own is source for source in sources):
            return sources
        return [*sources, own]

    @property
    def settled_by_replay(self) -> list[torch.Generator]:
        """Generators that are right once a pass has been replayed up to the position."""
        return [source for source in self.sources if source is not self._noise]

    # --- what training reports ---

    def count(self, batches: int) -> None:
        """Record a step over `batches` batches."""
        self.used += batches

    def end_epoch(self) -> None:
        """The pass under way is over."""
        self.epoch, self.used, self.under_way = self.epoch + 1, 0, False

    # --- state ---

    def state(self) -> dict[str, Any]:
        """The position, as plain types and tensors."""
        return {
            "epoch": self.epoch,
            "used": self.used,
            "under_way": self.under_way,
            "start": self._start if self.under_way else None,
            "sampler": _name(self._sampler),
            "coins": self._sampler.key.state_dict() if self._is_poisson else None,
        }

    def resume(self, state: dict[str, Any], same_ranks: bool, settle: Callable[[], None]) -> bool:
        """Make the next pass the rest of the one that `state` was taken in.

        With Poisson sampling the rest is the same on any number of ranks if the sampler's key is,
        which needs a seed, and drawn anew otherwise: what has been drawn says nothing about what
        will be. With other samplers it is continued on as many ranks, or if all ranks draw the
        same batches.

        Args:
            state: what :meth:`state` returned.
            same_ranks: the number of ranks is that of the saved run.
            settle: sets the random state that training goes on with, after the replay.

        Returns:
            Whether each sample keeps its intended probability of being in the rest; `False` where a
            pass without repetition starts over in a new order.
        """
        self.epoch, self.used, self.under_way = state["epoch"], state["used"], False
        self._start, self._next = None, None
        coins = state.get("coins") if self._is_poisson else None
        if coins is not None:
            known = self._sampler.key.resume(coins)
            self._repeats = known and self._sampler.key.seeded
        if not state["under_way"]:
            return True
        known = state["sampler"] == _name(self._sampler)
        whole = isinstance(self._sampler, _WHOLE)
        replay = known and (same_ranks or whole) and self._can_replay(state["start"])
        self._next = _Resumption(state["used"], state["start"] if replay else None, settle)
        return replay or isinstance(self._sampler, POISSON)

    def _can_replay(self, start: dict[str, Any] | None) -> bool:
        if self._is_poisson:
            return start is not None and self._repeats and "pass" in start
        sources = self.sources
        system = any(isinstance(source, SystemGenerator) for source in sources)
        return start is not None and not system and len(start["sources"]) == len(sources)

    # --- a pass ---

    def run(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of one pass of the sampler, the rest of one when resuming."""
        if self.under_way:
            self.end_epoch()  # the previous pass, whose end was never reported
        resumption, self._next = self._next, None
        self.under_way = True
        self.used = 0 if resumption is None else resumption.used
        if getattr(self._sampler, "cyclic", False):  # its batches are the same in each pass
            self._start, self._sampler.first = None, self.used
            if resumption is not None:
                resumption.settle()
            yield from batches()
            return
        if resumption is None or resumption.start is None:
            self._start = self._generator_states(first=self.used)
            yield from self._from(self.used, batches())
            return
        self._start = resumption.start
        set_torch_state(resumption.start["torch"])
        for source, saved in zip(self.sources, resumption.start["sources"], strict=True):
            source.set_state(saved)
        if self._is_poisson:
            self._sampler.repeat(resumption.start["pass"])
        first = resumption.start["first"]
        rest = self._from(first, batches())
        for _ in itertools.islice(rest, self.used - first):
            pass
        resumption.settle()
        yield from rest

    def _from(self, first: int, batches: Iterator[Any]) -> Iterator[Any]:
        """As many batches as are left of an epoch once `first` of them have been used."""
        batches = iter(batches)
        return itertools.islice(batches, max(0, len(self._sampler) - first)) if first else batches

    def _generator_states(self, first: int) -> dict[str, Any]:
        """State before a pass is drawn whose first batch is number `first` of the epoch."""
        state = {
            "first": first,
            "torch": torch_state(),
            "sources": [source.get_state() for source in self.sources],
        }
        if self._is_poisson:
            state["pass"] = self._sampler.next_pass()
        return state


def _make_resumable(sampler: Any, position: LoaderPosition) -> None:
    """Let `position` run the passes of `sampler` from now on."""
    own = type(sampler)
    if not hasattr(own, "_makes_resumable"):

        def run_by_position(self: Any) -> Iterator[Any]:
            return self._position.run(lambda: own.__iter__(self))  # type: ignore[no-any-return]

        body = {"__iter__": run_by_position, "__module__": own.__module__, "_makes_resumable": own}
        sampler.__class__ = type(own.__name__, (own,), body)
    sampler._position = position


def _name(sampler: Any) -> str:
    return type(sampler).__qualname__
