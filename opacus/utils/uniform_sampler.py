"""Poisson sampling: each sample joins each batch by a coin toss of its own.

This is the sampling that privacy amplification by subsampling assumes. Two consequences that
ordinary loaders do not have: batches differ in size, and a batch may be empty. An empty batch is a
step like any other (it is noised and accounted), so it is always yielded.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from opacus.core.kernels.noise.words import words_between
from opacus.core.privacy.draws import Draws
from opacus.core.privacy.key import SAMPLING, RunKey, SystemGenerator, reproducible_from_environment
from opacus.utils.groups import Groups

__all__ = [
    "Coins",
    "DistributedUniformWithReplacementSampler",
    "SystemGenerator",
    "UniformWithReplacementSampler",
    "poisson_draw",
]

# Below this rate the 2^-32 of a word is too coarse; the gaps are drawn in fp64.
_LOW_RATE = 2.0**-12
# Above this size, and unless the rate is high, visiting only the chosen samples is cheaper.
_LARGE_POPULATION = 2**20
_HIGH_RATE = 2.0**-4
# Coins that are tossed at once.
_PIECE = 1 << 18


@dataclass(frozen=True)
class Coins:
    """The random numbers of one batch: functions of a key, the batch's number and the item's.

    Attributes:
        key: 32 bytes for the coins of items.
        gaps: 32 others for gaps between chosen items.
        cut: 32 others for what stays of a batch that is too large.
        number: Of the batch; no two batches with these keys share it.
        secure: ChaCha20 instead of Philox.
    """

    key: bytes
    gaps: bytes
    number: int
    secure: bool = False
    cut: bytes = b""

    @classmethod
    def of(cls, key: RunKey, number: int, epoch: int = 0) -> Coins:
        """The random numbers of batch ``number`` of a run."""
        name = str(epoch) if epoch else ""
        streams = key.stream(SAMPLING, name), key.stream(f"{SAMPLING} by gaps", name)
        cut = key.stream(f"{SAMPLING} to cut", name)
        return cls(*streams, number, key.secure, cut)

    def words(self, start: int, end: int) -> Tensor:
        """A word, int64 in [0, 2^32), for each of the items ``start`` to ``end - 1``."""
        return words_between(start, end, self.key, self.number, self.secure)

    def kept(self, chosen: Tensor, most: int | None, rank: int = 0) -> Tensor:
        """So many of the chosen items, uniformly drawn, in order; all of them if they are fewer.

        Ranks that hold different items draw by themselves.
        """
        if most is None or len(chosen) <= most:
            return chosen
        start = rank << 34
        words = words_between(start, start + 2 * len(chosen), self.cut, self.number, self.secure)
        places = ((words[1::2] << 21) | (words[::2] >> 11)).argsort()[:most]
        return chosen[places.sort().values]

    def uniforms(self, start: int, end: int) -> Tensor:
        """The fp64 variates in [0, 1) number ``start`` to ``end - 1``, for gaps."""
        words = words_between(2 * start, 2 * end, self.gaps, self.number, self.secure)
        return ((words[1::2] << 21) | (words[::2] >> 11)).double().mul_(2.0**-53)


def poisson_draw(
    num_samples: int, sample_rate: float, coins: Coins | torch.Generator | None = None
) -> Tensor:
    """Draws one batch: each of `num_samples` samples is in it with probability `sample_rate`.

    The draws are independent. The probability is never above `sample_rate`, and below it by less
    than 2^-32 (relative: 2^-20), or not at all where the rate is low or the population large.

    Args:
        num_samples: size of the population, positive.
        sample_rate: probability, in (0, 1].
        coins: the batch's random numbers; by default, or from a generator, new ones in each call.

    Returns:
        The chosen indices, increasing, int64, shape `[batch]`; `batch` may be 0.
    """
    if not isinstance(coins, Coins):
        coins = Coins.of(RunKey(coins, secure=isinstance(coins, SystemGenerator)), 0)
    large = num_samples > _LARGE_POPULATION and sample_rate < _HIGH_RATE
    if large or sample_rate < _LOW_RATE:
        return _draw_by_gaps(num_samples, sample_rate, coins)
    # Rounded down to the grid of the words: a plain comparison would round it up.
    threshold = math.floor(sample_rate * 2.0**32)
    chosen = []
    for start in range(0, num_samples, _PIECE):
        words = coins.words(start, min(num_samples, start + _PIECE))
        chosen.append((words < threshold).nonzero().view(-1) + start)
    return torch.cat(chosen)


def _draw_by_gaps(num_samples: int, sample_rate: float, coins: Coins) -> Tensor:
    """The same draw from the gaps between chosen samples, which are geometric: O(batch) work."""
    expected = num_samples * sample_rate
    count = int(expected + 6 * math.sqrt(expected) + 16)  # more than enough, but for a rare case
    last, drawn, chosen = -1, 0, []
    while last < num_samples:
        uniforms = 1 - coins.uniforms(drawn, drawn + count)  # in (0, 1]
        drawn += count
        skipped = (uniforms.log() / math.log1p(-sample_rate)).floor()
        positions = last + (skipped.clamp(max=num_samples).long() + 1).cumsum(0)
        chosen.append(positions[positions < num_samples])
        last = int(positions[-1])
    return torch.cat(chosen)


class _Keyed(Sampler[list[int]]):
    """A sampler whose coins come from a key, and whose passes have numbers that are never reused.

    Attributes:
        key: where the coins come from; see `opacus.core.key.RunKey`.
        sample_rate: probability with which a sample joins a batch; steps are counted at it.
        draws: what is known of the batches that were drawn.
        cyclic: whether all passes have the same batches.
        first: number of the batch that the next pass begins with.
        most: largest batch of this rank; further items are left out. `None`: no limit.
        groups: of the items, of which batches are drawn in turn, at so many times the rate.
    """

    draws: Draws
    _split: tuple[bytes, Tensor] | None = None  # of cyclic passes: its key, and parts of the items

    sample_rate: float
    _shared = False
    cyclic = False
    latest = -1  # not told: parts come in the order of a pass
    _turn = 0  # group of the pass's first batch
    most: int | None = None
    groups: Groups | None = None
    first = 0  # batch of the next pass
    _steps_of_others: weakref.WeakMethod[Callable[[], int]] | None = None

    def _set_key(self, generator: torch.Generator | None) -> None:
        if self.cyclic:
            # The split of the data is no secret, but it must stay the same in a resumed run.
            system = generator is None and not reproducible_from_environment()
            if system or isinstance(generator, SystemGenerator):
                generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))
        self._generator = generator
        self._again: int | None = None
        secure = isinstance(generator, SystemGenerator)
        self.key = RunKey(generator, secure=secure, shared=self._shared)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sample_rate" and self.__dict__.get(name, value) != value:
            raise AttributeError(
                f"sample_rate of a {type(self).__name__} stays {self.sample_rate}, got {value!r}: "
                "steps are counted at it. Make another sampler for another rate"
            )
        super().__setattr__(name, value)

    @property
    def generator(self) -> torch.Generator | None:
        """Seeded source of the key, if there is one."""
        return self._generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        numbers = self.key.numbers
        self._set_key(value)
        self.key.at_least(numbers)

    def share_key(self) -> None:
        """All ranks of the default process group get rank 0's coins; a collective call."""
        key = self.key
        self.key = RunKey(self._generator, secure=key.secure, shared=True)
        self.key.at_least(key.numbers)
        self.key.agree()
        if self.groups is not None:
            self.groups = Groups(len(self.groups), self._generator, shared=True)

    def follow(self, steps_of_others: Callable[[], int]) -> None:
        """Draw no pass again of a run whose steps were loaded into the accountant.

        Args:
            steps_of_others: Method that tells their number.
        """
        self._steps_of_others = weakref.WeakMethod(steps_of_others)

    def next_pass(self) -> int:
        """Number of the pass that begins next."""
        told = None if self._steps_of_others is None else self._steps_of_others()
        if told is not None and self.groups is None and not self.cyclic:
            self.key.pass_over(told())
        return self.key.numbers.get(SAMPLING, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps_of_others": None}  # a copy has no optimizer

    def repeat(self, number: int) -> None:
        """The next pass is pass ``number`` again, to go on in the middle of it."""
        self._again = number

    def _pass(self, epoch: int = 0) -> Iterator[Coins]:
        """The coins of each batch of a new pass."""
        again, self._again = self._again, None
        if again is None:
            self.next_pass()
        number = self.key.advance(SAMPLING) if again is None else again
        start, self.first = self.first, 0
        if self.groups is None:
            self.draws.begin(start, whole=self.cyclic)
        else:
            self._turn = self.groups.latest + 1 - start
            self.draws.begin(self._turn + start, whole=True, cycle=len(self.groups))
        for index in range(start, len(self)):  # type: ignore[arg-type]
            yield Coins.of(self.key, (number << 32) + index, epoch)

    def _draw(self, size: int, sample_rate: float, coins: Coins) -> Tensor:
        """The items of a batch, increasing, int64, shape `[batch]`."""
        if self.groups is not None:
            count = len(self.groups)
            chosen = poisson_draw(size, min(1.0, sample_rate * count), coins)
            group = (self._turn + coins.number % 2**32) % count
            return chosen[self.groups.of(size)[chosen] == group]
        if not self.cyclic:
            return poisson_draw(size, sample_rate, coins)
        key = self.key.stream(SAMPLING, "parts")
        if self._split is None or self._split[0] != key:
            words = words_between(0, size, key, 0, self.key.secure)
            self._split = key, words.remainder(len(self)).int()  # type: ignore[arg-type]
        return (self._split[1] == coins.number % 2**32).nonzero().view(-1)


def _check_sizes(name: str, size: int, sample_rate: float, steps: int | None) -> None:
    if size <= 0:
        raise ValueError(f"{name} must be a positive integer, got {size}")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be a probability in (0, 1], got {sample_rate}")
    if steps is not None and steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}")


def _steps_per_epoch(sample_rate: float) -> int:
    """1 / sample_rate, rounded down, but not below an integer that rounding errors hide."""
    inverse = 1 / sample_rate
    nearest = round(inverse)
    return nearest if abs(inverse - nearest) < 1e-6 else int(inverse)


class UniformWithReplacementSampler(_Keyed):
    """Batch sampler for Poisson sampling on one process.

    Guarantee: in each batch, each sample is included independently of all others and of all other
    batches, with probability `sample_rate` (see `poisson_draw`). `len()` batches are yielded,
    empty ones included. "With replacement" means between batches; no batch holds a sample twice.

    Args:
        num_samples: size of the data set.
        sample_rate: probability with which a sample joins a batch, in (0, 1].
        generator: seeded source of the coins' key, for runs that can be repeated: two samplers
            with equal seeds draw the same batches. By default the key comes from the operating
            system, and the global seed changes nothing.
        steps: batches per epoch; by default 1 / `sample_rate`, rounded down.
        cyclic: no Poisson sampling: each sample is in one batch of each pass, the same in all of
            them, which was drawn once, independently and uniformly.

    Raises:
        ValueError: if a size, the rate or the number of steps is out of range.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
        cyclic: bool = False,
    ) -> None:
        _check_sizes("num_samples", num_samples, sample_rate, steps)
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.cyclic = cyclic
        self._set_key(generator)
        self.steps = _steps_per_epoch(sample_rate) if steps is None else steps
        self.draws = Draws()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for coins in self._pass():
            chosen = self._draw(self.num_samples, self.sample_rate, coins)
            yield coins.kept(chosen, self.most).tolist()


class _Index(int):
    """An int, where Opacus yields tensors of one number."""

    def item(self) -> int:
        """The number, as of a tensor."""
        return int(self)


class DistributedUniformWithReplacementSampler(_Keyed):
    """Batch sampler for Poisson sampling on several ranks of the default process group.

    The data set is dealt out to the ranks, each sample to exactly one. All ranks toss the same
    coins, and each takes the chosen samples that are its own: together they draw what
    `UniformWithReplacementSampler` draws on one process with the same seed, whatever the number of
    ranks. A rank's batch has `sample_rate * total_size / num_replicas` samples on average.

    Guarantee: as there, across all ranks. Coins are a function of the key, the pass (each
    iteration is another one), the epoch, the batch and the sample. Each rank yields exactly
    `len()` batches, empty ones included, so that no rank waits for another in a collective.

    Args:
        total_size: size of the whole data set. If `num_replicas` does not divide it, the first
            ranks hold one sample more; none is dropped or repeated.
        sample_rate: probability with which a sample joins a batch, in (0, 1].
        shuffle: deal the samples out in random order, a new one for each `set_epoch`; not where
            batches are truncated.
        shuffle_seed: seed of that order; must be the same on all ranks.
        steps: batches per epoch; by default 1 / `sample_rate`, rounded down.
        generator: seeded source of the coins' key, rank 0's; by default the operating system.
        cyclic: see `UniformWithReplacementSampler`.

    Raises:
        ValueError: if a size, the rate or the number of steps is out of range, or if there is no
            default process group.
    """

    _shared = True

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        shuffle: bool = True,
        shuffle_seed: int = 0,
        steps: int | None = None,
        generator: torch.Generator | None = None,
        cyclic: bool = False,
    ) -> None:
        _check_sizes("total_size", total_size, sample_rate, steps)
        self.total_size = total_size
        self.sample_rate = sample_rate
        self.shuffle = shuffle
        self.shuffle_seed = shuffle_seed
        self.cyclic = cyclic
        self._set_key(generator)
        self.epoch = 0
        self.num_replicas = torch.distributed.get_world_size()
        self.rank = torch.distributed.get_rank()
        self.num_samples = len(range(self.rank, total_size, self.num_replicas))
        self.num_batches = _steps_per_epoch(sample_rate) if steps is None else steps
        self.draws = Draws()
        self.key.agree()

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Deals the samples out anew; call it with the same value on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        owner = self._owners()
        for coins in self._pass(self.epoch):
            chosen = self._draw(self.total_size, self.sample_rate, coins)
            own = chosen[torch.from_numpy(owner)[chosen] == self.rank]
            yield [_Index(i) for i in coins.kept(own, self.most, self.rank).tolist()]

    def _owners(self) -> NDArray[np.int32]:
        """The rank that holds each sample in this epoch, shape `[total_size]`."""
        places = np.arange(self.total_size, dtype=np.int32) % self.num_replicas
        # Which others fill a rank's truncated batch must not depend on how many items there are.
        if not self.shuffle or self.most is not None:
            return places
        order = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
        owners = np.empty_like(places)
        owners[torch.randperm(self.total_size, generator=order, device="cpu").numpy()] = places
        return owners


# Samplers whose draws the accountants assume.
POISSON = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
