"""Correlated noise: the noise of a step takes back a part of that of the steps before it.

The sum of the gradients up to each step then has far less noise than with independent draws, for
the same privacy of the whole run (matrix factorisation, arXiv 2202.08312). The noise of step t is
``sum_j w[j] z[t - j]`` of white draws z, which the run's counter makes again.

Why it is private: with W the Toeplitz matrix of the w, the released gradients are
``G + W Z = W (C G + Z)``, where ``C = W^-1``. So they tell no more than ``C G + Z``, one Gaussian
mechanism over the whole run, whose sensitivity is that of ``C G``: the white draws have
``noise_multiplier * max_grad_norm`` times :attr:`CorrelatedNoise.sensitivity` as their deviation.
It holds for gradients that depend on what was released before (arXiv 2202.08312, theorem 2.1).

With a banded C, and samples that may be drawn in every b-th step alone, the steps of a sample move
different rows of ``C G``. These are a Poisson-sampled Gaussian mechanism each time, and privacy is
amplified by sampling (cyclic Poisson sampling, arXiv 2306.08153, theorem 4).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from opacus.core.privacy import correlated_search as search


@dataclass(frozen=True)
class CorrelatedNoise:
    """The correlation of a run's noise, and how often a sample takes part.

    Attributes:
        weights: Of the white draws of this step and of those before it; the first is 1.
        steps: Most steps that the run may take.
        separation: Two steps in which one sample takes part are at least so many apart;
            ``steps`` if it takes part once.
        buffers: (scale, decay) of each buffer: ``w[j]`` is the sum of ``scale * decay ** (j - 1)``.
            Then ``weights`` is ``(1.0,)``.
        strategy: The coefficients of C, of which the first is 1, where C is banded and the w follow
            from it. Then each step draws by Poisson sampling from one of ``separation`` groups of
            the data, in turn, and ``weights`` is ``(1.0,)``.

    Raises:
        ValueError: A value is out of range.
    """

    weights: tuple[float, ...]
    steps: int
    separation: int
    buffers: tuple[tuple[float, float], ...] = ()
    strategy: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("weights", "strategy"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        pairs = tuple((float(scale), float(decay)) for scale, decay in self.buffers)
        object.__setattr__(self, "buffers", pairs)
        for name in ("weights", "strategy"):
            series = getattr(self, name)
            if name == "strategy" and not series:
                continue
            if not series or series[0] != 1.0 or not all(map(math.isfinite, series)):
                raise ValueError(f"{name} must be finite and begin with 1, got {series}")
        for name in ("steps", "separation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        self._check_kind()

    def _check_kind(self) -> None:
        if not all(math.isfinite(scale) and abs(decay) < 1 for scale, decay in self.buffers):
            raise ValueError(
                f"buffers must be finite scales and decays in (-1, 1), got {self.buffers}"
            )
        kinds = (len(self.weights) > 1, bool(self.buffers), bool(self.strategy))
        if sum(kinds) > 1:
            raise ValueError(
                "weights (1.0,) must go with buffers or with a strategy, and not with both, got "
                f"{self.weights}, {self.buffers} and {self.strategy}"
            )
        if len(self.strategy) > self.separation:
            raise ValueError(
                f"a strategy of {len(self.strategy)} bands needs a separation of at least that, "
                f"got {self.separation}: a sample may take part again once its column has ended"
            )

    @classmethod
    def square_root(
        cls, bands: int, *, steps: int, separation: int | None = None
    ) -> CorrelatedNoise:
        """The banded inverse square root of prefix sums (BISR, arXiv 2505.12128).

        Args:
            bands: Number of weights: what a step costs, in white draws. 1 is DP-SGD.
            steps: See the class.
            separation: See the class; by default a sample takes part once.
        """
        _check_count("bands", bands)
        weights = [1.0]  # coefficients of (1 - x)^(1/2)
        for place in range(1, bands):
            weights.append(weights[-1] * (place - 1.5) / place)
        return cls(tuple(weights), steps, steps if separation is None else separation)

    @classmethod
    def optimised(
        cls, bands: int, *, steps: int, separation: int | None = None, rounds: int = 60
    ) -> CorrelatedNoise:
        """Weights with a small mean squared error of prefix sums (BandInvMF, arXiv 2505.12128).

        Found by descent from :meth:`square_root`: never worse, and clearly better with few bands.

        Args:
            bands, steps, separation: See :meth:`square_root`.
            rounds: Most iterations of the search.
        """
        known = cls.square_root(bands, steps=steps, separation=separation)
        apart = known.separation
        tail = search.descend(
            known.weights[1:], lambda point: search.error_of_weights(point, steps, apart), rounds
        )
        return known if tail is None else _better(known, cls((1.0, *tail), steps, apart))

    @classmethod
    def buffered(
        cls,
        buffers: int,
        *,
        steps: int,
        separation: int | None = None,
        largest: bool = False,
        rounds: int = 200,
    ) -> CorrelatedNoise:
        """A buffered linear Toeplitz matrix with a small error (BLT, arXiv 2404.16706, 2408.08868).

        All earlier draws are in a few buffers of the parameters' size (on each rank, of its
        shards), so a step costs one draw, however far back its noise reaches.

        Args:
            buffers: How many; 2 to 5 are nearly optimal.
            steps, separation: See :meth:`square_root`.
            largest: Minimise the largest squared error of a prefix sum, not the mean.
            rounds: Most iterations of the search.
        """
        _check_count("buffers", buffers)
        apart = steps if separation is None else separation
        known = cls((1.0,), steps, apart)
        point = search.descend(
            search.first_buffers(buffers, steps),
            lambda point: search.error_of_buffers(point, steps, apart, largest),
            rounds,
        )
        if point is None:
            return known
        logits, logs = torch.tensor(point, dtype=torch.float64, device="cpu").chunk(2)
        decays, scales = search.inverted(logits.sigmoid(), logs.exp())
        pairs = zip(scales.tolist(), decays.tolist(), strict=True)
        return cls((1.0,), steps, apart, buffers=tuple(pairs))

    @classmethod
    def banded(
        cls, bands: int, *, steps: int, groups: int | None = None, rounds: int = 100
    ) -> CorrelatedNoise:
        """A banded C with a small mean squared error, amplified by sampling (arXiv 2306.08153).

        Each step draws by Poisson sampling from the next of ``groups`` parts of the data, at so
        many times the sample rate. Few bands keep more of the amplification, many take back more
        noise: compare :meth:`squared_errors`, at the noise multiplier that each needs. Sampling at
        random distances (b-min-sep, arXiv 2602.09338) amplifies more, but is counted by simulation,
        which no accountant here does.

        Args:
            bands: Coefficients of C; a step's noise is made of so many buffers less one. 1 is
                DP-SGD.
            steps: See the class.
            groups: Parts of the data, at least ``bands``, which is the default.
            rounds: Most iterations of the search.
        """
        _check_count("bands", bands)
        ratios = [math.comb(2 * k, k) / 4**k for k in range(bands)]  # of (1 - x)^(-1/2)
        apart = bands if groups is None else groups
        known = cls((1.0,), steps, apart, strategy=tuple(ratios))
        tail = search.descend(
            ratios[1:], lambda point: search.error_of_strategy(point, steps), rounds
        )
        if tail is None:
            return known
        return _better(known, cls((1.0,), steps, apart, strategy=(1.0, *tail)))

    @property
    def groups(self) -> int | None:
        """Parts of the data that batches are drawn from in turn; ``None``: batches are parts."""
        return self.separation if self.strategy else None

    def accounted(self, sample_rate: float) -> tuple[float, int]:
        """Rate and number of the Poisson-sampled Gaussian steps that the whole run is.

        Args:
            sample_rate: Probability of one sample being in one batch, on average.
        """
        if self.groups is None:
            return 1.0, 1
        return min(1.0, sample_rate * self.groups), -(-self.steps // self.groups)

    @functools.cached_property
    def sensitivity(self) -> float:
        """Largest ``||C u||`` over all allowed participations, for gradients of norm 1.

        With a strategy, of one time that a sample takes part. Otherwise exact where C's
        coefficients fall and are not negative (arXiv 2405.13763, theorem 2), as those of
        :meth:`square_root` and :meth:`buffered` are; or of a matrix that exceeds them, a bound.
        """
        if self.strategy:
            return math.sqrt(math.fsum(value * value for value in self.strategy))
        falling = list(accumulate(map(abs, reversed(self._inverse())), max))[::-1]
        total = [0.0] * self.steps
        for start in range(0, self.steps, self.separation):
            for place in range(start, self.steps):
                total[place] += falling[place - start]
        return math.sqrt(math.fsum(value * value for value in total))

    def _inverse(self) -> list[float]:
        """The first ``steps`` coefficients of C."""
        if not self.buffers:
            return _reciprocal(self.weights, self.steps)
        past, found = [0.0] * len(self.buffers), [1.0]
        for _ in range(1, self.steps):  # what a step takes back of C's own earlier ones
            past = [d * p + found[-1] for (_, d), p in zip(self.buffers, past, strict=True)]
            pairs = zip(self.buffers, past, strict=True)
            found.append(-math.fsum(scale * held for (scale, _), held in pairs))
        return found

    @functools.cached_property
    def coefficients(self) -> list[float]:
        """``w[0]``, ``w[1]``, ..., ``[steps]``."""
        if self.strategy:
            return _reciprocal(self.strategy, self.steps)
        if not self.buffers:
            return [*self.weights, *[0.0] * self.steps][: self.steps]
        held, found = [scale for scale, _ in self.buffers], [1.0]
        for _ in range(1, self.steps):
            found.append(math.fsum(held))
            held = [h * decay for h, (_, decay) in zip(held, self.buffers, strict=True)]
        return found

    @functools.cached_property
    def spreads(self) -> list[float]:
        """Deviation of each step's noise relative to that of its own draw, ``[steps]``."""
        return [math.sqrt(s) for s in accumulate(w * w for w in self.coefficients)]

    def squared_errors(self) -> list[float]:
        """Of the noise in the sum of the first 1, 2, ... gradients, ``[steps]``.

        In units of ``(noise_multiplier * max_grad_norm)^2`` and for one element. Of independent
        noise they are 1, 2, ..., times the most steps that a sample takes part in; with a strategy
        the noise multiplier is that of :meth:`accounted` steps.
        """
        of_draws = accumulate(sum_ * sum_ for sum_ in accumulate(self.coefficients))
        return [self.sensitivity**2 * value for value in of_draws]


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")


def _reciprocal(series: tuple[float, ...], steps: int) -> list[float]:
    """The first ``steps`` coefficients of 1 / series, whose first is 1."""
    past, found = series[1:], [1.0]
    for place in range(1, steps):
        reach = min(len(past), place)
        found.append(-math.fsum(past[j] * found[place - 1 - j] for j in range(reach)))
    return found


def _better(*plans: CorrelatedNoise) -> CorrelatedNoise:
    return min(plans, key=lambda plan: math.fsum(plan.squared_errors()))
