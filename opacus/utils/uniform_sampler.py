"""Poisson sampling: each sample joins each batch by a coin toss of its own.

This is the sampling that privacy amplification by subsampling assumes. Two consequences that
ordinary loaders do not have: batches differ in size, and a batch may be empty. An empty batch is a
step like any other (it is noised and accounted), so it is always yielded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from opacus.core.privacy.noise import device_of, draw_seed, fold

# torch.rand draws fp32 multiples of 2^-24.
_UNIFORM_UNIT = 2.0**-24
# Below this rate the unit above is too coarse; the gaps are drawn in fp64.
_LOW_RATE = 2.0**-12
# Above this size, and unless the rate is high, visiting only the chosen samples is cheaper.
_LARGE_POPULATION = 2**20
_HIGH_RATE = 2.0**-4


def poisson_draw(
    num_samples: int, sample_rate: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draws one batch: each of `num_samples` samples is in it with probability `sample_rate`.

    The draws are independent. The probability is never above `sample_rate`, and below it by less
    than 2^-24 (relative: 2^-12), or not at all where the rate is low or the population large.

    Args:
        num_samples: size of the population, positive.
        sample_rate: probability, in (0, 1].
        generator: source of randomness; the global CPU generator if `None`.

    Returns:
        The chosen indices, increasing, int64, shape `[batch]`; `batch` may be 0.
    """
    large = num_samples > _LARGE_POPULATION and sample_rate < _HIGH_RATE
    if large or sample_rate < _LOW_RATE:
        return _draw_by_gaps(num_samples, sample_rate, generator)
    # Rounded down to the grid of the uniforms: a plain comparison would round it up.
    threshold = math.floor(sample_rate / _UNIFORM_UNIT) * _UNIFORM_UNIT
    uniforms = _uniforms(num_samples, torch.float32, generator)
    return (uniforms < threshold).nonzero().reshape(-1).cpu()


def _draw_by_gaps(
    num_samples: int, sample_rate: float, generator: torch.Generator | None
) -> Tensor:
    """The same draw from the gaps between chosen samples, which are geometric: O(batch) work."""
    expected = num_samples * sample_rate
    count = int(expected + 6 * math.sqrt(expected) + 16)  # more than enough, but for a rare case
    last, chosen = -1, []
    while last < num_samples:
        uniforms = 1 - _uniforms(count, torch.float64, generator).cpu()  # in (0, 1]
        skipped = (uniforms.log() / math.log1p(-sample_rate)).floor()
        positions = last + (skipped.clamp(max=num_samples).long() + 1).cumsum(0)
        chosen.append(positions[positions < num_samples])
        last = int(positions[-1])
    return torch.cat(chosen)


class SystemGenerator(torch.Generator):
    """A generator whose coin tosses in Poisson sampling come from the operating system.

    A `torch.Generator` on the CPU has but 2^32 streams: its seed could be found by trial. For all
    else (the seeds of data loader workers, shuffling) this is such a generator, seeded by the
    operating system.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manual_seed(int.from_bytes(os.urandom(7), "big"))

    def uniforms(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` uniform variates in [0, 1), shape `[count]`, as `torch.rand` rounds them."""
        bits = 24 if dtype == torch.float32 else 53
        raw = np.frombuffer(os.urandom(8 * count), dtype=np.int64) & (2**bits - 1)
        return torch.from_numpy(raw).to(dtype).div(2**bits)


def _uniforms(count: int, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    if isinstance(generator, SystemGenerator):
        return generator.uniforms(count, dtype)
    return torch.rand(count, dtype=dtype, generator=generator, device=device_of(generator))


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


class UniformWithReplacementSampler(Sampler[list[int]]):
    """Batch sampler for Poisson sampling on one process.

    Guarantee: in each batch, each sample is included independently of all others and of all other
    batches, with probability `sample_rate` (see `poisson_draw`). `len()` batches are yielded,
    empty ones included. "With replacement" means between batches; no batch holds a sample twice.

    Args:
        num_samples: size of the data set.
        sample_rate: probability with which a sample joins a batch, in (0, 1].
        generator: source of randomness; the global CPU generator if `None`.
        steps: batches per epoch; by default 1 / `sample_rate`, rounded down.

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
    ) -> None:
        _check_sizes("num_samples", num_samples, sample_rate, steps)
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.generator = generator
        self.steps = _steps_per_epoch(sample_rate) if steps is None else steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield poisson_draw(self.num_samples, self.sample_rate, self.generator).tolist()


class DistributedUniformWithReplacementSampler(Sampler[list[int]]):
    """Batch sampler for Poisson sampling on several ranks of the default process group.

    The data set is dealt out to the ranks, each sample to exactly one, and each rank tosses the
    coins for its own share. Together the ranks draw what `UniformWithReplacementSampler` draws on
    one process: a rank's batch has `sample_rate * total_size / num_replicas` samples on average.

    Guarantee: as there, across all ranks. The streams of two ranks differ even if their
    generators (or global seeds) are equal: the rank and the epoch are folded into the seed, which
    is drawn anew from the generator whenever an iteration starts. Each rank yields exactly
    `len()` batches, empty ones included, so that no rank waits for another in a collective.

    Args:
        total_size: size of the whole data set. If `num_replicas` does not divide it, the first
            ranks hold one sample more; none is dropped or repeated.
        sample_rate: probability with which a sample joins a batch, in (0, 1].
        shuffle: deal the samples out in random order, a new one for each `set_epoch`.
        shuffle_seed: seed of that order; must be the same on all ranks.
        steps: batches per epoch; by default 1 / `sample_rate`, rounded down.
        generator: source of the coin tosses' seed; the global CPU generator if `None`.

    Raises:
        ValueError: if a size, the rate or the number of steps is out of range, or if there is no
            default process group.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        shuffle: bool = True,
        shuffle_seed: int = 0,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_sizes("total_size", total_size, sample_rate, steps)
        self.total_size = total_size
        self.sample_rate = sample_rate
        self.shuffle = shuffle
        self.shuffle_seed = shuffle_seed
        self.generator = generator
        self.epoch = 0
        self.num_replicas = torch.distributed.get_world_size()
        self.rank = torch.distributed.get_rank()
        self.num_samples = len(range(self.rank, total_size, self.num_replicas))
        self.num_batches = _steps_per_epoch(sample_rate) if steps is None else steps

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Deals the samples out anew; call it with the same value on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        share, coins = self._share(), self._coins()
        for _ in range(self.num_batches):
            chosen = poisson_draw(self.num_samples, self.sample_rate, coins)
            # NumPy integers index everything that int does, and have `.item()` as tensors do.
            yield list(share[chosen.numpy()])

    def _share(self) -> np.ndarray:
        """Indices of the samples that this rank holds in this epoch, shape `[num_samples]`."""
        if not self.shuffle:
            return np.arange(self.rank, self.total_size, self.num_replicas)
        order = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
        dealt = torch.randperm(self.total_size, generator=order, device="cpu")
        return dealt[self.rank :: self.num_replicas].numpy()

    def _coins(self) -> torch.Generator:
        """This rank's own stream for one iteration."""
        if isinstance(self.generator, SystemGenerator):
            return self.generator
        seed = draw_seed(self.generator)
        stream = self.epoch * self.num_replicas + self.rank
        return torch.Generator().manual_seed(fold(seed + self.shuffle_seed, stream))
