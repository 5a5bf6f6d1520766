"""The private optimizer for gradients that arrive clipped and summed (ghost clipping)."""

from __future__ import annotations

from torch import Tensor

from opacus.core.processed import is_processed
from opacus.optimizers.optimizer import DPOptimizer


class DPOptimizerFastGradientClipping(DPOptimizer):
    """Like :class:`DPOptimizer`, for ``p.grad`` that already holds the clipped sum.

    The criterion of ``make_private`` clips; this optimizer accumulates physical
    batches, adds noise calibrated to the same clipping norm, divides and steps.
    Arguments are those of :class:`DPOptimizer`.
    """

    def _set_up(self) -> None:
        super()._set_up()
        self.expects_criterion = False
        self._clipped_batches = 0
        self._accumulated = 1

    def note_clipped_batch(self) -> None:
        """Called by the criterion's ``backward()``: one more clipped batch is in ``p.grad``."""
        self._clipped_batches += 1

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches whose clipped sums are in the current step."""
        return max(self._clipped_batches, self._accumulated)

    def accumulate(self) -> None:
        """Move ``p.grad`` into ``p.summed_grad``.

        Raises:
            RuntimeError: No clipped gradient has been formed since the last step.
        """
        self._check_clipped()
        for parameter in self.params:
            grad, parameter.grad = parameter.grad, None
            if grad is not None and not is_processed(grad):
                self._accumulate(parameter, grad)
        self._accumulated = max(self._clipped_batches, 1)
        self._clipped_batches = 0

    def _check_clipped(self) -> None:
        unclipped = self.expects_criterion and self._clipped_batches == 0
        if unclipped or all(p.grad is None for p in self.params):
            raise RuntimeError(
                "step() found no clipped gradient: use the criterion that make_private returned "
                "and call backward() on its loss. The backward() of an ordinary loss clips "
                "nothing, so it leaves no gradient in ghost modes"
            )

    def clip_and_accumulate(self) -> None:
        """Clipping happened in the backward pass; accumulate its result."""
        self.accumulate()

    def _get_flat_grad_sample(self, p: Tensor) -> Tensor:
        raise ValueError("ghost clipping forms no per-sample gradients")

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear ``p.grad`` and, after a real step, ``p.summed_grad``.

        Args:
            set_to_none: Set ``p.grad`` to ``None`` rather than to zero.
        """
        self._clipped_batches = 0
        super().zero_grad(set_to_none)

    def reset_accumulation(self) -> None:
        """Forget queued skip signals and partial sums of an unfinished logical batch."""
        self._clipped_batches = 0
        super().reset_accumulation()
        self.original_optimizer.zero_grad()
