"""What a run promises as one value, and a proposal of it for a data set and a budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opacus.accountants.sampling import Sampling
from opacus.accountants.utils import get_noise_multiplier
from opacus.core.privacy.correlated import CorrelatedNoise

# Doubling the batch has to lower the noise of the mean gradient by this factor to be worth it.
_WORTH = 1.25
_LEAST_STEPS = 200
_LEAST_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sampling, unit, clipping, noise and accounting of a run.

    ``make_private`` makes one, the private optimizer has it as ``optimizer.plan``, with the noise
    and C of its next step, and checkpoints carry it: a run of another unit, sampling or way to clip
    does not go on from them.

    Attributes:
        sample_rate: Probability with which an item is in a batch.
        poisson_sampling: Whether items are drawn by Poisson sampling.
        sampling: Further properties of the sampling, ``None`` for plain Poisson sampling.
        max_batch_size: Items that batches have room for; ``None``: any number.
        privacy_unit: Name of the tensor that says whose each row is; ``None``: rows are samples.
        clipping: ``"flat"``, ``"normalised"``, ``"psac"``, ``"per_layer"`` or ``"adaptive"``.
        max_grad_norm: Clipping norm C, or one for each parameter.
        noise_multiplier: Deviation of the noise in units of C.
        correlated_noise: How the noise of steps is correlated; ``None``: it is independent.
        expected_batch_size: Of all ranks together.
        release_grid: Part of the noise that sums are rounded to; ``None``: no rounding.
        accountant: Name of the accountant.
        steps: How many are meant to be taken, if it is known.
        delta: Of the guarantee, if it is known.
        reasons: Why each number was chosen, with the source.
    """

    sample_rate: float
    noise_multiplier: float
    max_grad_norm: float | tuple[float, ...]
    expected_batch_size: float
    poisson_sampling: bool = True
    sampling: Sampling | None = None
    max_batch_size: int | None = None
    privacy_unit: str | None = None
    clipping: str = "flat"
    correlated_noise: CorrelatedNoise | None = None
    release_grid: float | None = None
    accountant: str = "prv"
    steps: int | None = None
    delta: float | None = None
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def arguments(self) -> dict[str, Any]:
        """Those of ``make_private``, for an engine with the accountant of the plan."""
        names = ("sample_rate", "noise_multiplier", "expected_batch_size", "poisson_sampling")
        names += ("release_grid", "max_batch_size", "privacy_unit", "clipping", "correlated_noise")
        norm = self.max_grad_norm
        return {
            **{name: getattr(self, name) for name in names},
            "max_grad_norm": list(norm) if isinstance(norm, tuple) else norm,
            "sampling": self.sampling if self.max_batch_size is None else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        noise = self.correlated_noise
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "sampling": None if self.sampling is None else self.sampling.to_dict(),
            "correlated_noise": None if noise is None else dataclasses.asdict(noise),
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse to resume a run whose epsilon is for another unit or kind of sampling.

        Rates, noise and C may differ: the accountant records those of each step.

        Raises:
            ValueError: It names what differs.
        """
        own = self.state_dict()
        for state in (own, known := dict(saved)):
            how = state.get("sampling") or {}
            state["sampling"], state["rows"] = how.get("sampling"), how.get("rows")
        names = ("privacy_unit", "clipping", "poisson_sampling", "sampling", "rows")
        wrong = [f"{n}={known.get(n)!r} (here {own[n]!r})" for n in names if known.get(n) != own[n]]
        if wrong:
            raise ValueError(
                f"the run that was saved had {', '.join(wrong)}: what its epsilon is about would "
                "change. Go on with the same arguments of make_private"
            )

    def __str__(self) -> str:
        """A table of the numbers, and the reasons."""
        shown = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        rows = [f"{n:20} {v:g}" if isinstance(v, float) else f"{n:20} {v}" for n, v in shown[:-1]]
        return "\n".join([*rows, *(f"- {reason}" for reason in self.reasons)])


def plan(
    *,
    dataset_size: int,
    target_epsilon: float,
    epochs: float,
    target_delta: float | None = None,
    max_grad_norm: float = 1.0,
    batch_sizes: Sequence[int] | None = None,
    least_steps: int = _LEAST_STEPS,
    accountant: str = "pld",
) -> Plan:
    """Propose batch size, steps, noise and clipping norm for a budget of privacy and computing.

    A starting point from rules that were published, each named in ``plan.reasons``; it has seen no
    data, so it costs no privacy. ``print(plan)`` shows it with the batch sizes that were compared.

    Args:
        dataset_size: Number of items N, a public number.
        target_epsilon: Budget, above 0; not exceeded.
        epochs: Passes over the data that can be computed: ``epochs * N`` gradients.
        target_delta: By default ``N ** -1.1``, at most 1e-5.
        max_grad_norm: Clipping norm C.
        batch_sizes: What to choose from; by default powers of two.
        least_steps: Fewer are not proposed, unless no batch size has as many.
        accountant: Name of the accountant.

    Returns:
        The plan, whose :meth:`Plan.arguments` are those of ``make_private``.

    Raises:
        ValueError: A number is out of range, or no noise meets the budget.
    """
    if dataset_size < 2 or not 0 < epochs < math.inf or least_steps < 1:
        raise ValueError(
            "dataset_size must be at least 2, epochs positive and least_steps at least 1, got "
            f"{dataset_size!r}, {epochs!r} and {least_steps!r}"
        )
    delta = min(1e-5, dataset_size**-1.1) if target_delta is None else target_delta
    if batch_sizes is None:
        most = dataset_size // 2
        batch_sizes = [_LEAST_BATCH << k for k in range(40) if _LEAST_BATCH << k <= most] or [most]
    if not all(0 < size <= dataset_size for size in batch_sizes):
        raise ValueError(f"batch_sizes must be between 1 and {dataset_size}, got {batch_sizes}")
    sizes = sorted(set(batch_sizes))
    enough = [size for size in sizes if _steps(dataset_size, epochs, size) >= least_steps]
    table = [
        _candidate(size, dataset_size, epochs, target_epsilon, delta, "rdp")
        for size in (enough or sizes[:1])[-6:]
    ]
    size, _, _ = _choose(table)
    lines = [
        f"batch {each}: {steps} steps, noise multiplier {sigma:.3g} by rdp, noise of the mean "
        f"gradient {sigma / each:.3g} C{'  <- chosen' if each == size else ''}"
        for each, steps, sigma in table
    ]
    _, steps, sigma = _candidate(size, dataset_size, epochs, target_epsilon, delta, accountant)
    return Plan(
        sample_rate=size / dataset_size,
        noise_multiplier=sigma,
        max_grad_norm=max_grad_norm,
        expected_batch_size=size,
        accountant=accountant,
        steps=steps,
        delta=delta,
        reasons=(
            *lines,
            "batch size: for a fixed number of gradients larger batches have less noise in each "
            "mean (arXiv 2110.05679, 2204.13650); the largest one is taken that still lowers it by "
            f"{_WORTH} times a doubling (the saturation of arXiv 2501.18914) and leaves "
            f"{least_steps} steps to learn in",
            f"steps: {epochs:g} epochs; more of them ask for more noise in each step, which longer "
            "training usually repays (arXiv 2204.13650, 2303.00654)",
            f"delta: {'N^-1.1, at most 1e-5' if target_delta is None else 'as given'} "
            "(arXiv 2303.00654)",
            "clipping norm: of little weight once most gradients are clipped, if the learning rate "
            "moves against it, and with Adam none (arXiv 2206.07136); 0.1 to 1 is usual",
            "learning rate: search it first, on public data or by counting the trials",
        ),
    )


_Candidate = tuple[int, int, float]  # batch size, steps, noise multiplier


def _steps(dataset_size: int, epochs: float, size: int) -> int:
    return max(1, math.floor(epochs * dataset_size / size * (1 + 1e-9)))


def _candidate(
    size: int, dataset_size: int, epochs: float, epsilon: float, delta: float, accountant: str
) -> _Candidate:
    steps = _steps(dataset_size, epochs, size)
    sigma = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta,
        sample_rate=size / dataset_size,
        steps=steps,
        accountant=accountant,
    )
    return size, steps, sigma


def _choose(table: list[_Candidate]) -> _Candidate:
    """From small to large batches, until a doubling is not worth it."""
    chosen = table[0]
    for known, larger in itertools.pairwise(table):
        doublings = math.log2(larger[0] / known[0])
        gain = (known[2] / known[0]) / (larger[2] / larger[0])
        if gain < _WORTH**doublings:
            break
        chosen = larger
    return chosen
