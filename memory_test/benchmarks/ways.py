"""Ways to train that are timed against each other: a mode with features, ``MODE+FEATURE+...``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from memory_test.common.failures import UsageError

EAGER, COMPILED = "no_dp", "no_dp_compiled"
BASELINES = (EAGER, COMPILED)
DEFERRED = "+deferred"
GIB = 2**30


@dataclass(frozen=True)
class Amount:
    """Memory: GiB (``38.9GiB``), or a multiple of the non-private step's peak (``1.15x``)."""

    number: float
    of_peak: bool = False

    def bytes(self, peak: float = 0.0) -> int:
        """As bytes, where the non-private step needs ``peak`` bytes."""
        return round(self.number * (peak if self.of_peak else GIB))

    def __str__(self) -> str:
        return f"{self.number:g}{'x' if self.of_peak else 'GiB'}"


@dataclass(frozen=True)
class Way:
    """One way to train: a mode and its features.

    Attributes:
        mode: ``"no_dp"``, ``"no_dp_compiled"`` or a ``grad_sample_mode``.
        deferred: Whether norms wait for the end of the backward pass.
        compiled: Whether the blocks of a private model are compiled.
        nologits: Whether the loss is computed without logits.
        offload: Whether parameters, gradients and the optimizer's state live on the host.
        accumulate: Physical batches of a step; gradients are reduced once.
        float8: Whether stored per-sample gradients have 8 bits.
        budget: ``memory_budget`` of the private model. On the CPU, which has none, what it has
            beyond the non-private peak is the ``held_budget``.
        held: ``held_budget`` of the private model.
        host: ``host_budget`` of the private model.
    """

    mode: str
    deferred: bool = False
    compiled: bool = False
    nologits: bool = False
    offload: bool = False
    accumulate: int = 1
    float8: bool = False
    budget: Amount | None = None
    held: Amount | None = None
    host: Amount | None = None

    @property
    def private(self) -> bool:
        """Whether gradients are clipped and noised."""
        return self.mode not in BASELINES

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled, with privacy or without."""
        return self.compiled or self.mode == COMPILED

    @property
    def baseline(self) -> Way:
        """The non-private step with the same features."""
        shared = {name: getattr(self, name) for name in ("nologits", "offload", "accumulate")}
        return Way(COMPILED if self.compiles else EAGER, **shared)

    @property
    def eager(self) -> Way:
        """The same without compiled blocks."""
        return replace(self, mode=EAGER) if not self.private else replace(self, compiled=False)

    @property
    def features(self) -> list[str]:
        """What it has beyond the mode, as it is written."""
        found = ((field.name, getattr(self, field.name)) for field in fields(self)[1:])
        return [
            name if value is True else f"{name}={value}"
            for name, value in found
            if value is True or (value and value != 1)
        ]

    def __str__(self) -> str:
        return "+".join([self.mode, *self.features])


def ways_of(text: str) -> tuple[Way, ...]:
    """Private ways from ``"ghost_fsdp_bk,ghost_fsdp+deferred,ghost_fsdp_bk+budget=1.15x"``.

    Raises:
        UsageError: One of them is not private, or has a feature that there is not.
    """
    ways = tuple(_way_of(name) for name in text.split(",") if name)
    for way in ways:
        if not way.private:
            raise UsageError(f"--modes {way}: non-private steps are measured anyway")
    return ways


def _way_of(text: str) -> Way:
    mode, *features = text.split("+")
    given: dict[str, Any] = {}
    for feature in features:
        name, equals, value = feature.partition("=")
        read = _READERS.get(name)
        if read is None or bool(equals) == (read is bool):
            raise UsageError(f"--modes {text}: {feature!r}; there are {FEATURES}")
        try:
            given[name] = True if read is bool else read(value)
        except ValueError as error:
            raise UsageError(f"--modes {text}: {feature!r}: {error}") from error
    return Way(mode, **given)


def _amount(text: str) -> Amount:
    for unit in ("GiB", "x"):
        if text.endswith(unit):
            return Amount(float(text.removesuffix(unit)), unit == "x")
    raise ValueError("write 38.9GiB, or 1.15x for so much of the non-private peak")


def _gib(text: str) -> Amount:
    amount = _amount(text)
    if amount.of_peak:
        raise ValueError("write 10GiB")
    return amount


def _several(text: str) -> int:
    if int(text) < 2:
        raise ValueError("at least 2 physical batches")
    return int(text)


_READERS: dict[str, Callable[[str], Any]] = {
    "deferred": bool, "compiled": bool, "nologits": bool, "offload": bool, "float8": bool,
    "accumulate": _several, "budget": _amount, "held": _gib, "host": _gib,
}  # fmt: skip
FEATURES = (
    "deferred, compiled, nologits, offload, accumulate=8, float8, budget=1.15x, held=10GiB, "
    "host=20GiB"
)


def baselines_of(ways: Iterable[Way], compiled: bool) -> tuple[Way, ...]:
    """The non-private steps that private ways are compared with.

    The first is what all ratios are to: eager, with those features that all ways have. Then,
    with ``compiled``, the same with compiled blocks, and for each way the one with its features.
    """
    like = [way.baseline for way in ways]
    plain = like[0].eager if len({way.eager for way in like}) == 1 else Way(EAGER)
    second = [replace(plain, mode=COMPILED)] if compiled else []
    return tuple(dict.fromkeys([plain, *second, *like]))
