"""From clipped sums to noised gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.profiling import NOISE, timed
from opacus.core.platform.sharded import locals_of
from opacus.core.privacy.gradients import is_processed, mark_processed
from opacus.core.privacy.noise import parameter_names
from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.parallelism import Single, divide
from opacus.optimizers.adam import tell_noise

UNCLEARED = (
    "the gradients of an earlier step are still there and would be released a second time: call "
    "optimizer.zero_grad() in each step"
)


class NoisedSums:
    """Adds the noise of a step, and divides; the sums are in ``p.summed_grad``."""

    original_optimizer: Any
    params: list[nn.Parameter]
    accumulated_iterations: int
    expected_batch_size: Any
    loss_reduction: str
    _privacy: PrivacyParams
    _parallelism: Single
    _names: dict[int, str]  # of parameters, by id
    # Whether p.grad takes the place of p.summed_grad in a step, rather than being a copy.
    _overwrites_sums: bool = False
    _clipped_with = 0.0  # largest C of the batches in this step
    _clipped_scaled_by: list[float] | None = None  # what their gradients were multiplied by
    _noise_std = 0.0  # of the step's own draws
    _scales_next = False  # scale_grad comes after the noise
    _divided_by = 1.0  # what p.grad has been divided by as its noise was added
    listed: list[nn.Parameter] | None  # while a step runs

    def _note_clipping_norm(self) -> None:
        """C may change before the step (by a scheduler, say): the noise is for the largest."""
        self._clipped_with = max(self._clipped_with, self._privacy.sensitivity)
        source = self._privacy.gradient_scales
        scales = None if source is None else list(source())
        if self._clipped_scaled_by not in (None, scales):
            raise RuntimeError(
                "the scales of gradients have changed between the batches of a step, or before its "
                "noise: call optimizer.zero_grad() after a state was loaded"
            )
        self._clipped_scaled_by = scales

    @timed(NOISE)
    def add_noise(self) -> None:
        """Write ``p.summed_grad`` plus noise to ``p.grad``.

        The noise is scaled with the largest C that a batch in the sum was clipped with. In a step
        the result is divided at once, and :meth:`scale_grad` finds that done.

        Raises:
            ValueError: The sum was used in an earlier step already.
        """
        parameters, sums = self.params, []
        for parameter in parameters:
            summed: Tensor | None = getattr(parameter, "summed_grad", None)
            sums.append(torch.zeros_like(parameter) if summed is None else summed)
        check_processed(sums)
        self._note_clipping_norm()
        std = self._privacy.noise_std_at(self._clipped_with) * self._parallelism.noise_growth
        self._noise_std = std
        scales = self._clipped_scaled_by
        if scales is not None:
            torch._foreach_mul_(locals_of(sums), scales)
        with torch.no_grad():
            dtypes = [parameter.dtype for parameter in parameters]
            names = self._noise_names(parameters)
            divisor = self._divisor()  # refused before noise is drawn, if it is
            if not self._divides_at_once():
                divisor = 1.0
            noised = self._parallelism.noised(
                std, sums, dtypes, self._overwrites_sums, names, divisor
            )
            used: list[Tensor] = []
            try:
                for place, (parameter, grad) in enumerate(zip(parameters, noised, strict=True)):
                    same = grad.shape == parameter.shape
                    parameter.grad = grad if same else grad.view_as(parameter)
                    used += self._retired(parameter)
                    sums[place] = grad  # lets go of the sum
            finally:
                mark_processed(*used)
            if scales is not None:
                torch._foreach_div_(locals_of([p.grad for p in parameters]), scales)
        self._forget_clipping_norm()
        self._divided_by = divisor

    def _forget_clipping_norm(self) -> None:
        self._clipped_with, self._clipped_scaled_by, self._divided_by = 0.0, None, 1.0

    def name_parameters(self, module: nn.Module) -> None:
        """Let the noise go by the names that parameters have in ``module``.

        Without it they go by their places in the optimizer's groups.
        """
        self._names = parameter_names(module)

    def _noise_names(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        """A unique name for each of ``parameters``."""
        known = [self._names.get(id(p)) for p in parameters]
        if None not in known:
            return known  # type: ignore[return-value]
        every = [p for group in self.original_optimizer.param_groups for p in group["params"]]
        places = {id(p): f"number {place}" for place, p in enumerate(every)}
        pairs = zip(known, parameters, strict=True)
        return [places[id(p)] if name is None else name for name, p in pairs]

    def _retired(self, parameter: nn.Parameter) -> list[Tensor]:
        """Free the parameter's used sum; returns the part that is kept."""
        summed: Tensor | None = getattr(parameter, "summed_grad", None)
        if self._overwrites_sums:  # it is the gradient now, which autograd may add to
            parameter.summed_grad = None  # type: ignore[attr-defined]
        elif summed is not None:
            # Sums of half-precision gradients are fp32 until their noise is in.
            parameter.summed_grad = summed = summed.to(parameter.dtype)  # type: ignore[attr-defined]
            return [summed]
        return []

    def scale_grad(self) -> None:
        """Divide ``p.grad`` by the expected batch size, for ``loss_reduction="mean"``."""
        divisor = self._divisor()
        if hasattr(self.original_optimizer, "noise_std"):
            std = self._noise_std * self._parallelism.noise_spread
            tell_noise(self.original_optimizer, std / divisor)
        done, self._divided_by = self._divided_by, 1.0
        self._divide(divisor / done)

    def _divisor(self) -> float:
        if self._privacy.loss_reduction != "mean":
            return 1.0
        size = self._privacy.expected_batch_size
        if size is None:
            raise ValueError(
                "expected_batch_size is needed with loss_reduction='mean', to divide by"
            )
        batches = self.accumulated_iterations * self._parallelism.world_size
        return float(size * batches)

    def _divides_at_once(self) -> bool:
        """Whether noise and division are one pass over the gradients.

        Only in a step of ours, where :meth:`scale_grad` comes next; not where either is another's
        (a subclass's, say), which is to find the sum with its noise in between.
        """
        own = [getattr(method, "__func__", None) for method in (self.add_noise, self.scale_grad)]
        ours = [NoisedSums.add_noise, NoisedSums.scale_grad]
        return self._scales_next and own == ours

    def _divide(self, divisor: float | Tensor) -> None:
        grads = [parameter.grad for parameter in self.params]
        with torch.no_grad():
            divide([grad for grad in grads if grad is not None], divisor)

    def reduce(self) -> None:
        """Sum ``p.summed_grad`` over ranks, where that has not been done.

        Raises:
            ValueError: The sum was used in an earlier step already.
        """
        sums = [getattr(parameter, "summed_grad", None) for parameter in self.params]
        check_processed([total for total in sums if total is not None])
        with torch.no_grad():
            self._parallelism.reduce(self.params)


def check_processed(tensors: Sequence[Tensor]) -> None:
    """Refuse gradients that were used in an earlier step.

    Raises:
        ValueError: ``zero_grad`` was not called since.
    """
    if any(map(is_processed, tensors)):
        raise ValueError(UNCLEARED)
