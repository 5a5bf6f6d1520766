"""How a batch was drawn, where that is not plain Poisson sampling.

Each class describes one step besides its noise multiplier and sample rate. The noise multiplier
is always the standard deviation of the noise divided by the clipping norm of one row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Rates are products and quotients of counts, so they agree up to rounding.
_SAME_RATE = 1e-9


@dataclass(frozen=True)
class Sampling:
    """The base of all ways to draw a batch other than plain Poisson sampling."""

    def check_rate(self, sample_rate: float) -> None:
        """Raises ValueError if a step of this kind cannot have `sample_rate`."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain types from which `sampling_from_dict` makes an equal value."""
        fields = dataclasses.asdict(self)
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        return {"sampling": type(self).__name__, **plain}


@dataclass(frozen=True)
class TruncatedPoisson(Sampling):
    """Poisson sampling; of a batch larger than `max_batch_size`, so many stay, uniformly drawn.

    Attributes:
        dataset_size: number of samples, at least 1.
        max_batch_size: most samples of a batch, at least 1.
    """

    dataset_size: int
    max_batch_size: int

    def __post_init__(self) -> None:
        _check_whole(self, "dataset_size", 1)
        _check_whole(self, "max_batch_size", 1)


@dataclass(frozen=True)
class FixedSize(Sampling):
    """Batches of exactly `batch_size` different samples, drawn uniformly and afresh each step.

    Neighbours differ by adding or removing one sample, as everywhere in this package; the place
    of a removed sample is taken by another, so a step has twice the sensitivity.

    Attributes:
        dataset_size: number of samples, at least 1.
        batch_size: samples of a batch, between 1 and `dataset_size`.
    """

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_whole(self, "dataset_size", 1)
        _check_whole(self, "batch_size", 1)
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"batch_size must be at most dataset_size, {self.dataset_size}, "
                f"got {self.batch_size}"
            )

    def check_rate(self, sample_rate: float) -> None:
        """Raises ValueError unless `sample_rate` is batch size / dataset size."""
        rate = self.batch_size / self.dataset_size
        if not math.isclose(rate, sample_rate, rel_tol=_SAME_RATE):
            raise ValueError(f"sample_rate must be {rate!r} for {self}, got {sample_rate!r}")


@dataclass(frozen=True)
class UserRows(Sampling):
    """Poisson sampling of rows, clipped one by one, where the unit is a user with several rows.

    Attributes:
        rows: most rows that one user has, at least 1.
    """

    rows: int

    def __post_init__(self) -> None:
        _check_whole(self, "rows", 1)


@dataclass(frozen=True)
class GaussianMixture(Sampling):
    """One unit moves the sum by at most `sensitivities[i]` with probability `probabilities[i]`.

    For contributions that are weighted or bounded in another way than `UserRows`. What is missing
    of a total probability of 1 belongs to sensitivity 0.

    Attributes:
        sensitivities: in clipping norms, each finite and at least 0.
        probabilities: of the same length, adding up to at most 1.
    """

    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("sensitivities", "probabilities"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if len(self.sensitivities) != len(self.probabilities) or not self.sensitivities:
            raise ValueError(
                "sensitivities and probabilities must have the same length of at least 1, got "
                f"{len(self.sensitivities)} and {len(self.probabilities)}"
            )
        if not all(0.0 <= value < math.inf for value in self.sensitivities):
            raise ValueError(
                f"sensitivities must be finite and at least 0, got {self.sensitivities}"
            )
        total = math.fsum(self.probabilities)
        if not all(value >= 0.0 for value in self.probabilities) or not total <= 1 + _SAME_RATE:
            raise ValueError(
                "probabilities must be at least 0 and add up to at most 1, got "
                f"{self.probabilities}"
            )

    def check_rate(self, sample_rate: float) -> None:
        """Raises ValueError unless `sample_rate` is the probability of moving the sum at all."""
        pairs = zip(self.sensitivities, self.probabilities, strict=True)
        rate = math.fsum(p for s, p in pairs if s > 0.0)
        if not math.isclose(rate, sample_rate, rel_tol=_SAME_RATE):
            raise ValueError(
                f"sample_rate must be the total probability of sensitivities above 0, {rate!r}, "
                f"got {sample_rate!r}"
            )


_KINDS = {kind.__name__: kind for kind in (TruncatedPoisson, FixedSize, UserRows, GaussianMixture)}


def sampling_from_dict(state: Any) -> Sampling:
    """Returns the sampling that `Sampling.to_dict` described.

    Raises:
        ValueError: if `state` describes none.
    """
    fields = dict(state) if isinstance(state, Mapping) else {}
    kind = _KINDS.get(str(fields.pop("sampling", None)))
    if kind is None:
        raise ValueError(f"a sampling must be described by one of {sorted(_KINDS)}, got {state!r}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{state!r} does not describe a {kind.__name__}: {error}") from error


def _check_whole(sampling: Sampling, name: str, least: int) -> None:
    """Raises ValueError unless the attribute is a whole number of at least `least`."""
    value = getattr(sampling, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
