"""The private optimizer: clip, sum, add noise, divide, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.core.isolation.check import Isolation
from opacus.core.kernels.norms.reference import sums_of_squares
from opacus.core.platform.profiling import CLIP_AND_SUM, PROFILE, STEP, timed
from opacus.core.privacy.clipping import Clipped, clip_flat
from opacus.core.privacy.gradients import mark_processed, unprocessed
from opacus.core.privacy.noise import gaussian
from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.parallelism import Sharded, Single
from opacus.core.step.private_step import release
from opacus.optimizers.batches import PhysicalBatches
from opacus.optimizers.noised import NoisedSums, check_processed
from opacus.optimizers.penalties import PenalizedOptimizer
from opacus.optimizers.per_sample import PerSampleGradients
from opacus.optimizers.settings import PrivacySettings
from opacus.optimizers.step_account import CountedOptimizer
from opacus.optimizers.step_checks import CheckedOptimizer, only_makes_state
from opacus.optimizers.step_guard import guard_steps
from opacus.optimizers.utils import check_rows, weighted_sums


def _mark_as_processed(obj: Tensor | list[Tensor]) -> None:
    """Mark gradients that were used in a step and must not be used in another."""
    mark_processed(*(obj if isinstance(obj, list) else [obj]))


def _check_processed_flag(obj: Tensor | list[Tensor]) -> None:
    """Refuse gradients that were used in an earlier step.

    Raises:
        ValueError: ``zero_grad`` was not called since.
    """
    check_processed(obj if isinstance(obj, list) else [obj])


def _tensors_of(parameters: Sequence[Any]) -> list[Tensor]:
    """The per-sample gradients of parameters, of all accumulated batches."""
    every = [parameter.grad_sample for parameter in parameters]
    return [t for one in every for t in (one if isinstance(one, list) else [one])]


def _generate_noise(
    std: float,
    reference: Tensor,
    generator: torch.Generator | None = None,
    secure_mode: bool = False,
) -> Tensor:
    """Gaussian noise of standard deviation ``std`` in the shape of ``reference``.

    See :func:`opacus.core.privacy.noise.gaussian`.
    """
    return gaussian(std, reference, generator, secure_mode)


class DPOptimizer(
    NoisedSums,
    PrivacySettings,
    PerSampleGradients,
    PenalizedOptimizer,
    PhysicalBatches,
    CheckedOptimizer,
    CountedOptimizer,
):
    """Makes any optimizer differentially private (DP-SGD, arXiv:1607.00133).

    A step clips the per-sample gradients that the model's hooks left in
    ``p.grad_sample`` and sums them into ``p.summed_grad``, adds noise, divides by the
    expected batch size (``loss_reduction="mean"``), writes the result to ``p.grad``
    and calls the wrapped optimizer.

    Guarantee: without noise, removing one sample changes the summed gradient by at
    most ``max_grad_norm`` in L2 norm; the noise on that sum has standard deviation
    ``noise_multiplier * max_grad_norm``. A sample whose gradient is not finite
    contributes nothing; a parameter that was not used gets noise alone.

    ``torch.amp.GradScaler``: gradients are divided by the loss scale before they are
    clipped. A step that the scaler skips releases no gradient but is counted like any
    other: that it was skipped depends on the data, and no noise hides it.

    Args:
        optimizer: The optimizer to wrap; it stays reachable as ``original_optimizer``.
        noise_multiplier: Standard deviation of the noise in units of ``max_grad_norm``.
        max_grad_norm: Clipping norm C.
        expected_batch_size: Expected number of samples of a logical batch on this
            rank; with Poisson sampling the actual number must not be used.
        loss_reduction: ``"mean"`` or ``"sum"``.
        generator: Seeded source of the noise's key, for runs that can be repeated. By default
            the key comes from the operating system (:class:`opacus.core.privacy.key.RunKey`).
        secure_mode: Noise from ChaCha20, with a key that never comes from a seed, and sums
            rounded to a grid, against floating-point attacks.

    Raises:
        ValueError: A value is out of range, or ``expected_batch_size`` is missing with
            ``loss_reduction="mean"``.
        TypeError: An unknown keyword argument.
    """

    _parallelism_class: ClassVar[type[Single]] = Single
    # Keywords that other optimizers understand; make_private passes them to all.
    _ignored_keywords: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        unknown = sorted(kwargs.keys() - self._ignored_keywords)
        if unknown:
            raise TypeError(f"{type(self).__name__} got unexpected arguments {unknown}")
        if loss_reduction == "mean" and expected_batch_size is None:
            raise ValueError(
                "expected_batch_size is needed with loss_reduction='mean', to divide by"
            )
        self.original_optimizer = optimizer
        self.listed: list[nn.Parameter] | None = None  # while a step runs
        self._privacy = PrivacyParams(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
        )
        self._privacy.gradient_scales = getattr(optimizer, "gradient_scales", None)
        self._parallelism = self._parallelism_class(generator, secure_mode)
        # Of the model's hooks: checks what is about to be released.
        self.isolation: Isolation | None = None
        self._start_counting()
        self._start_batches()
        self._skipped_samples: int | Tensor = 0
        self._clipped_with = 0.0  # largest C of the batches in this step
        self._names: dict[int, str] = {}  # of parameters, by id
        for parameter in self.params:
            parameter.summed_grad = None  # type: ignore[attr-defined]
        # Step and state hooks of torch, without add_param_group on the shared groups.
        self.__setstate__({})
        self._set_up()
        guard_steps(self)

    def __getattr__(self, name: str) -> Any:
        # Schedule-free optimizers have these two; others do not, and are asked whether they do.
        if name in ("train", "eval") and "original_optimizer" in self.__dict__:
            return getattr(self.original_optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _set_up(self) -> None:
        """What a subclass adds to a new instance."""

    @property
    def skipped_samples(self) -> int:
        """Number of samples left out so far because their gradients were not finite."""
        return int(self._skipped_samples)  # waits for the device only when it is asked for

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters that are updated and require gradients; within a step always the same."""
        if self.listed is not None:
            return self.listed
        groups = self.original_optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    # --- clipping ---

    @timed(CLIP_AND_SUM)
    def clip_and_accumulate(self) -> None:
        """Clip the per-sample gradients and add their sum to ``p.summed_grad``."""
        used = self._used_parameters()
        _check_processed_flag(_tensors_of(used))
        self._note_clipping_norm()
        samples = [self._get_flat_grad_sample(p) for p in used]
        check_rows(samples)
        clipped = self._clip(used, samples)
        scale = self._scaled.scale
        for parameter in used:  # it is not clipped, and takes memory: the noised one is next
            parameter.grad = None
        self._accumulate(used, [*weighted_sums(clipped, samples)], scale)
        _mark_as_processed(_tensors_of(used))
        if clipped:
            self._skipped_samples = self._skipped_samples + clipped[0].excluded.sum()

    def _clip(self, used: list[nn.Parameter], samples: list[Tensor]) -> list[Clipped]:
        """Clipping factors of each parameter in ``used``; flat clipping: all the same."""
        if not samples:
            return []
        each = self._norms(samples)
        if self._clipped_scaled_by is not None:
            scale_of = dict(zip(map(id, self.params), self._clipped_scaled_by, strict=True))
            each = [norm * scale_of[id(p)] for norm, p in zip(each, used, strict=True)]
        norms = torch.stack(each, dim=1).norm(2, dim=1)
        return [clip_flat(norms, self._privacy.sensitivity, self._privacy.clip_rule)] * len(samples)

    def _norms(self, samples: list[Tensor]) -> list[Tensor]:
        """``[B]`` norms of each parameter's per-sample gradients, on one device, unscaled."""
        device, scale = samples[0].device, self._scaled.scale
        norms = [norm_sq.sqrt().to(device) for norm_sq in sums_of_squares(samples)]
        return norms if scale == 1.0 else [norm / scale for norm in norms]

    def _discard(self) -> None:
        """Use up the per-sample gradients of a batch that overflowed."""
        used = self._used_parameters()
        tensors = _tensors_of(used)
        _check_processed_flag(tensors)
        for parameter in used:
            parameter.grad = None
        _mark_as_processed(tensors)

    def _accumulate(
        self, parameters: Sequence[nn.Parameter], grads: list[Tensor | None], scale: float
    ) -> None:
        """Add ``grads / scale`` to the sums of this step; those of an earlier one are replaced.

        Empties ``grads`` on the way, so that no memory is held twice.
        """
        sums = unprocessed([getattr(p, "summed_grad", None) for p in parameters])
        for place, parameter in enumerate(parameters):
            grad, grads[place] = grads[place], None
            known, sums[place] = sums[place], None
            if grad is not None:
                grad = grad if scale == 1.0 else grad / scale
                total = grad if known is None else known + grad
                parameter.summed_grad = total  # type: ignore[attr-defined]

    # --- step ---

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Everything before the wrapped optimizer's step.

        Returns:
            Whether to step: ``False`` for a physical batch that is not the last one of
            its logical batch, and after an overflow that ``GradScaler`` found in any of
            them (on any rank).
        """
        if not release(self):
            return False
        mark_processed(*[p.grad for p in self.params if p.grad is not None])  # released by now
        return True

    def noise_and_count(self) -> None:
        """Add noise to the sum of all ranks, and count; after an error nothing is left."""
        entries = self._counts()
        try:
            self.reduce()
            self._scales_next = True
            self.add_noise()
            self._count_step(entries)
            if self._second_use is not None:
                self._second_use.released()
        except BaseException:
            self.zero_grad(set_to_none=True)
            raise
        finally:
            self._scales_next = False

    def drop_frozen(self) -> None:
        """What was frozen after the backward pass gets no noise, so it must not be updated."""
        groups = self.original_optimizer.param_groups
        for parameter in (p for group in groups for p in group["params"]):
            if parameter.requires_grad:
                continue
            parameter.grad = None
            for name in ("summed_grad", "grad_sample"):
                if getattr(parameter, name, None) is not None:
                    setattr(parameter, name, None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clip, add noise and update the parameters.

        Args:
            closure: Re-evaluates the model and its loss, with backward; it is called once.

        Returns:
            What the closure returned, or ``None``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        elif not self.original_optimizer.state and only_makes_state(self):
            return self.original_optimizer.step()
        self._step()
        if PROFILE.on and not self._is_last_step_skipped:
            PROFILE.report(sharded=isinstance(self._parallelism, Sharded))
        return loss

    @timed(STEP)
    def _step(self) -> None:
        self.listed = self.params
        try:
            if self.pre_step():
                self.original_optimizer.step()
            # Also after a physical batch: zero_grad is due.
            mark_processed(*[p.grad for p in self.listed if p.grad is not None])
        finally:
            self.listed = None
            if self.isolation is not None and self.isolation.recorder.attention.waits:
                self.isolation.recorder.attention.give_back()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear ``p.grad``, ``p.grad_sample`` and, after a real step, ``p.summed_grad``.

        Args:
            set_to_none: Set ``p.grad`` to ``None`` rather than to zero; the others
                always become ``None``.
        """
        self._cleared_since_signal = True
        if self.isolation is not None and self.isolation.pending:
            self.isolation.drop()
        for parameter in self.params:
            parameter.grad_sample = None  # type: ignore[attr-defined]
            if not self._is_last_step_skipped:
                parameter.summed_grad = None  # type: ignore[attr-defined]
        if not self._is_last_step_skipped:
            self._forget_step()
        self.original_optimizer.zero_grad(set_to_none)

    def _forget_step(self) -> None:
        """The step is over, or will not be finished."""
        self.give_up_step()
        self._forget_batch()
        self._forget_clipping_norm()

    def reset_accumulation(self) -> None:
        """Forget partial sums of an unfinished logical batch, and skip signals given by hand."""
        self._forget_step()
        self._forget_signals()
        self._is_last_step_skipped = self._overflowed = False
        for parameter in self._recorded():
            parameter.grad = None  # it is not clipped
        for parameter in self.params:
            parameter.summed_grad = None  # type: ignore[attr-defined]
            parameter.grad_sample = None  # type: ignore[attr-defined]
