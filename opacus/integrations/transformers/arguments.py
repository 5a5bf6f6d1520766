"""The privacy settings of a Trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opacus.accountants import create_accountant
from opacus.core.privacy.params import check_switches
from opacus.core.step.modes import AUTO, MODES

# Units of privacy that a Trainer can protect: what differs between neighbouring data sets.
UNITS = ("example",)
_NOT_HERE = "sampling and clipping would have to go by {}, and a Trainer's data set says of none"


@dataclass(frozen=True, kw_only=True)
class DPArguments:
    """The privacy of a training run; all that is private beside ``TrainingArguments``.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given.

    Attributes:
        target_epsilon: Epsilon after all planned steps; the noise is chosen so that it is not
            exceeded.
        noise_multiplier: Standard deviation of the noise in units of ``clipping_norm``.
        delta: Delta of the guarantee, well below 1 / (size of the training set). ``None``: a tenth
            of that, which is logged.
        expected_batch_size: Examples that a step is expected to draw, in all processes together.
            ``None``: ``per_device_train_batch_size * gradient_accumulation_steps`` a process.
            Poisson draws vary in size, and one that is larger than planned takes a further
            physical batch: with a share of the process a little (three of its square roots) below
            a multiple of ``per_device_train_batch_size``, that is rare.
        clipping_norm: Norm C to which the gradient of each example is clipped. The
            ``max_grad_norm`` of ``TrainingArguments`` is not used.
        grad_sample_mode: How that is done; see ``docs/modes.md``. ``"auto"`` chooses.
        accountant: ``"prv"``, ``"rdp"``, ...: how epsilon is counted.
        privacy_unit: The protected unit: ``"example"``, an item of the training set (of DPO: a
            prompt with its two answers).
        poisson_sampling: Draw each example independently, as the accountants assume. ``False``
            keeps Trainer's order of the data, for comparisons; epsilon is then not proven.
        secure_mode: See :class:`~opacus.PrivacyEngine`.
        log_private_gradient_norms: Log quantiles of the examples' gradient norms, to choose
            ``clipping_norm`` by. They come from private data **without noise**: no guarantee
            covers them.

    Raises:
        ValueError: A value is out of range; it names the argument.
        TypeError: A value is not a number.
    """

    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    expected_batch_size: int | None = None
    clipping_norm: float = 1.0
    grad_sample_mode: str = AUTO
    accountant: str = "prv"
    privacy_unit: str = "example"
    poisson_sampling: bool = True
    secure_mode: bool = False
    log_private_gradient_norms: bool = False

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                "give exactly one of target_epsilon (noise is chosen) and noise_multiplier, got "
                f"target_epsilon={self.target_epsilon}, noise_multiplier={self.noise_multiplier}"
            )
        _check_number("target_epsilon", self.target_epsilon, above=0.0)
        _check_number("noise_multiplier", self.noise_multiplier, above=0.0, or_equal=True)
        _check_number("clipping_norm", self.clipping_norm, above=0.0)
        _check_number("delta", self.delta, above=0.0)
        if self.delta is not None and self.delta >= 1.0:
            raise ValueError(f"delta must be below 1, got {self.delta}")
        check_switches(
            poisson_sampling=self.poisson_sampling,
            secure_mode=self.secure_mode,
            log_private_gradient_norms=self.log_private_gradient_norms,
        )
        size = self.expected_batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"expected_batch_size must be a whole number above 0, got {size!r}")
        known = (AUTO, *(name for name, mode in MODES.items() if mode.needs_criterion), "hooks")
        if self.grad_sample_mode not in known:
            raise ValueError(
                f"grad_sample_mode must be one of {list(known)}, got {self.grad_sample_mode!r}"
            )
        if self.log_private_gradient_norms and self.grad_sample_mode == "hooks":
            raise ValueError(
                "log_private_gradient_norms needs a mode that keeps the norms: use "
                "grad_sample_mode='auto'"
            )
        create_accountant(mechanism=self.accountant)
        _check_unit(self.privacy_unit)

    def delta_for(self, size: int) -> float:
        """Delta for a training set of ``size`` examples.

        Raises:
            ValueError: Delta is so large that it protects nobody.
        """
        if self.delta is None:
            return 0.1 / size
        if self.delta >= 1.0 / size:
            raise ValueError(
                f"delta={self.delta} protects nobody among {size} training examples: it must be "
                f"well below 1/{size}"
            )
        return self.delta


def _check_number(name: str, value: float | None, *, above: float, or_equal: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    fits = value >= above if or_equal else value > above
    if not fits or not math.isfinite(value):
        raise ValueError(
            f"{name} must be finite and {'at least' if or_equal else 'above'} {above:g}, "
            f"got {value}"
        )


def _check_unit(unit: str) -> None:
    if unit in UNITS:
        return
    why = _NOT_HERE.format(f"{unit}s") if unit in ("user", "document") else "it is not known"
    raise ValueError(
        f"privacy_unit must be one of {list(UNITS)}, got {unit!r}: {why}. Make each item of the "
        "training set what is to be hidden"
    )
