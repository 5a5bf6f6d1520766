"""The only home of the privacy parameters of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

REDUCTIONS = ("mean", "sum")


class PrivacyParams:
    """Clipping norm C, noise multiplier sigma, expected batch size and reduction.

    One instance is shared by everything that clips and everything that adds
    noise, so that a change of C (by a scheduler, say) reaches both or neither.

    Args:
        noise_multiplier: Standard deviation of the noise in units of the
            sensitivity. 0 means no noise, hence no privacy.
        max_grad_norm: Clipping norm C > 0: one number for flat clipping, or one for
            each parameter for per-layer clipping; see :func:`plain_norms`.
        expected_batch_size: Expected number of samples of a logical batch on
            one rank; ``None`` when gradients are summed.
        loss_reduction: ``"mean"`` or ``"sum"``.

    Raises:
        TypeError: A value is no number; nothing is changed then.
        ValueError: One is out of range, likewise.
    """

    def __init__(
        self,
        *,
        noise_multiplier: float,
        max_grad_norm: Any,
        expected_batch_size: int | float | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        self.loss_reduction = loss_reduction
        # How a sample's whole norm becomes its factor; see opacus.core.privacy.clipping.
        self.clip_rule = "flat"
        self._max_grad_norm = 0.0
        self.max_grad_norms: list[float] | None = None
        # What gradients of the parameters are multiplied by before they are clipped and get noise,
        # and divided by afterwards, in the order of the optimizer; None: by nothing.
        self.gradient_scales: Callable[[], Sequence[float]] | None = None
        self._count_noise_std: float | None = None
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.expected_batch_size = expected_batch_size

    @property
    def loss_reduction(self) -> str:
        return self._loss_reduction

    @loss_reduction.setter
    def loss_reduction(self, value: str) -> None:
        if value not in REDUCTIONS:
            raise ValueError(f"loss_reduction must be one of {REDUCTIONS}, got {value!r}")
        self._loss_reduction = value

    @property
    def expected_batch_size(self) -> int | float | None:
        return self._expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: int | float | None) -> None:
        if value is not None and not 0 < as_number("expected_batch_size", value) < math.inf:
            raise ValueError(
                f"expected_batch_size must be > 0 and finite, got {value!r}: the mean divides by it"
            )
        self._expected_batch_size = value

    @property
    def noise_multiplier(self) -> float:
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if not as_number("noise_multiplier", value) >= 0 or math.isinf(value):
            raise ValueError(f"noise_multiplier must be a finite number >= 0, got {value!r}")
        if self._max_grad_norm:
            self._check_finite(value, [self._max_grad_norm])
        _check_count(value, self._count_noise_std)
        self._noise_multiplier = value

    @property
    def count_noise_std(self) -> float | None:
        """Noise of a private count (adaptive clipping) that shares the budget, or None.

        Theorem 1 of arXiv:1905.03871: the gradient gets more noise, so that both together cost what
        ``noise_multiplier`` says, which the accountant keeps counting.

        Raises:
            ValueError: It is so small that the count alone costs more.
        """
        return self._count_noise_std

    @count_noise_std.setter
    def count_noise_std(self, value: float | None) -> None:
        _check_count(self._noise_multiplier, value)
        self._count_noise_std = value

    def _check_finite(self, noise_multiplier: float, norms: list[float]) -> None:
        if noise_multiplier > 0 and not all(map(math.isfinite, norms)):
            raise ValueError(
                "max_grad_norm must be finite where noise_multiplier is not 0: the noise of an "
                f"infinite one is infinite; got {norms} and {noise_multiplier!r}"
            )

    @property
    def max_grad_norm(self) -> float:
        """Clipping norm C of the whole gradient: with per-layer norms, their L2 norm."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        value = plain_norms(value)
        several = isinstance(value, Sequence) and not isinstance(value, str)
        values: Sequence[object] = value if several else [value]
        kind = "a number, or a list of numbers for per-layer clipping"
        norms = [as_number("max_grad_norm", n, kind) for n in values]
        if not norms or not all(norm > 0 for norm in norms):
            raise ValueError(f"max_grad_norm must be > 0, got {value!r}")
        self._check_finite(self._noise_multiplier, norms)
        if several:
            self.max_grad_norms = norms
        elif self.max_grad_norms is not None:
            # One number for per-layer norms scales them all, and the noise with them.
            scale = norms[0] / self._max_grad_norm
            self.max_grad_norms = [norm * scale for norm in self.max_grad_norms]
        self._max_grad_norm = math.hypot(*norms) if several else norms[0]

    @property
    def sensitivity(self) -> float:
        """L2 change of the summed gradient when one sample is removed."""
        return self._max_grad_norm

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the summed gradient."""
        return self.noise_std_at(self.sensitivity)

    def noise_std_at(self, sensitivity: float) -> float:
        """:attr:`noise_std` of a sum that was clipped with other norms than C."""
        multiplier = self.noise_multiplier
        if multiplier and self.count_noise_std is not None:
            multiplier = (multiplier**-2 - (2 * self.count_noise_std) ** -2) ** -0.5
        return multiplier * sensitivity if multiplier else 0.0


def _check_count(noise_multiplier: float, std: float | None) -> None:
    if std is not None and not noise_multiplier < 2 * std:
        raise ValueError(
            "noise_multiplier must be smaller than 2 * unclipped_num_std, got "
            f"{noise_multiplier} and {std}: see Theorem 1 of arXiv:1905.03871"
        )


def plain_norms(value: Any) -> Any:
    """Clipping norms in Python's numbers: a list of them for an array or a tensor."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_number(name: str, value: object, kind: str = "a number") -> float:
    """The value as a number; a text is none, even where it could be read as one."""
    try:
        if not isinstance(value, str):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} must be {kind}, got {value!r}")


def check_switches(**switches: object) -> None:
    """Check values that are on or off.

    Raises:
        TypeError: One is neither True nor False: a text is always true, also "false".
    """
    for name, value in switches.items():
        if isinstance(value, str) or value not in (True, False):
            raise TypeError(f"{name} must be True or False, got {value!r}")
