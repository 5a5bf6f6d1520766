"""The private optimizer for gradients that arrive clipped and summed (ghost clipping)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from opacus.core.privacy.gradients import unprocessed, was_processed
from opacus.core.sums.seen import REPLAY_ADVICE
from opacus.core.sums.sum_watch import SumWatch
from opacus.core.sums.unreduced import Unreduced
from opacus.optimizers.optimizer import DPOptimizer
from opacus.optimizers.utils import check_norm_count


class DPOptimizerFastGradientClipping(DPOptimizer):
    """Like :class:`DPOptimizer`, for ``p.grad`` that already holds the clipped sum.

    The criterion of ``make_private`` clips; this optimizer accumulates physical
    batches, adds noise calibrated to the same clipping norm, divides and steps.
    Arguments are those of :class:`DPOptimizer`.

    Attributes:
        reduce_once: Whether ranks that share a model by FSDP2 (``*_fsdp*`` modes) add up sums of a
            logical batch's physical batches once, where memory allows; until then they are in
            neither ``p.grad`` nor ``p.summed_grad``. The same on all ranks.
    """

    reads_samples = False
    reduce_once = True
    _unreduced: Unreduced | None = None

    def _set_up(self) -> None:
        super()._set_up()
        if self._privacy.max_grad_norms is not None:
            check_norm_count(self._privacy.max_grad_norms, len(self.params))
        self._known = [p for group in self.original_optimizer.param_groups for p in group["params"]]
        self._watch = SumWatch()
        self.clipped_batches = 0
        self._clipped_samples = 0
        self._accumulated = 1
        self._loss_scale: float | None = None

    def overwrite_sums(self) -> None:
        """Write the noised gradient over ``p.summed_grad``, which is ``None`` after a step then."""
        self._overwrites_sums = True

    def note_clipped_batch(
        self,
        loss_scale: float | None = None,
        excluded: bool = False,
        samples: int = 0,
        doubt: Tensor | None = None,
        unreduced: Unreduced | None = None,
    ) -> None:
        """Called by the criterion's ``backward()``: one more clipped batch is in ``p.grad``.

        Args:
            loss_scale: Factor that ``GradScaler`` put on the loss, so on ``p.grad`` too;
                ``None`` without one.
            samples: Number of samples in it.
            doubt: Flag on the device, true if the sum differs from what was measured: the step then
                changes nothing, and the next one is refused.
            excluded: Whether samples with infinite or NaN gradients were left out.
            unreduced: Where sums wait for the last physical batch.

        Raises:
            RuntimeError: Batches of one step have different loss scales.
        """
        if self.clipped_batches and self._loss_scale != loss_scale:
            self._refuse_scale(f"a batch with loss scale {loss_scale} was added to one with")
        self._loss_scale = loss_scale
        self._unreduced = unreduced
        self.clipped_batches += 1
        self._clipped_samples += samples
        self._note_clipping_norm()
        parameters = self.params
        if excluded and loss_scale is not None:
            # As autograd would have left them: the scaler looks for that, and backs off.
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
        self._watch.note(parameters)
        self._watch.doubt(doubt)

    def more_follow(self) -> bool:
        """See :class:`opacus.core.step.private_step.Optimizer`."""
        return self.reduce_once and self._check_skip_next_step(pop_next=False)

    @property
    def unreleased(self) -> list[nn.Parameter]:
        """See :class:`opacus.optimizers.wrapped.WrappedOptimizer`."""
        return self.params if self.clipped_batches else []

    @property
    def _waits(self) -> bool:
        """Whether the sum of the latest batch waits unreduced."""
        return self._unreduced is not None and self._unreduced.fresh

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches whose clipped sums are in the current step."""
        return max(self.clipped_batches, self._accumulated)

    def accumulate(self) -> None:
        """Move ``p.grad`` into ``p.summed_grad``.

        Raises:
            RuntimeError: No clipped gradient has been formed since the last step.
        """
        parameters = self.params
        fresh = unprocessed([parameter.grad for parameter in parameters])
        self._check_clipped(fresh)
        self._check_known(parameters)
        self.check_unchanged()
        scale = 1.0 if self._scaled.divided else self._scaled.scale
        for parameter in parameters:
            parameter.grad = None
        self._accumulate(parameters, fresh, scale)
        if self._unreduced is not None:
            self._unreduced.take()
        self._batch_is_taken()

    def _forget_waiting(self, warn: bool = False) -> None:
        if self._unreduced is not None:
            self._unreduced.drop(warn)

    def _discard(self) -> None:
        parameters = self.params
        self._check_clipped(unprocessed([parameter.grad for parameter in parameters]))
        for parameter in parameters:
            parameter.grad = None
        self._batch_is_taken()

    def _batch_is_taken(self) -> None:
        self._loss_scale = None
        self._watch.forget()
        self._accumulated = max(self.clipped_batches, 1)
        self.clipped_batches = self._clipped_samples = 0

    def _samples(self) -> int:
        return self._clipped_samples

    def check_unchanged(self) -> None:
        """Refuse gradients that are not the clipped sums which ``backward()`` has left.

        Raises:
            RuntimeError: It names the parameters; nothing has been changed.
        """
        if not self.expects_criterion:  # somebody else fills p.grad
            return
        divided_by = self._scaled.scale if self._scaled.divided else 1.0
        parameters = self.params
        if not self.clipped_batches:  # the next backward() drops what a step has used
            parameters = [p for p in parameters if p.grad is None or not was_processed(p.grad)]
        changed = self._watch.changed(parameters, divided_by)
        if self._watch.changed_before():
            raise RuntimeError(
                "the step before released nothing: its clipped sums were changed between backward "
                "and step(), or its backward pass computed something else when it was run again "
                f"for the sum. {REPLAY_ADVICE}"
            )
        if changed:
            raise RuntimeError(
                f"the gradients of {self._named(changed)} were changed or added between backward() "
                "and step(), where p.grad holds the clipped sum that the noise is made for. Likely "
                "causes: torch.nn.utils.clip_grad_norm_ (with a Trainer, set max_grad_norm=0), "
                "gradients multiplied by a world size or a number of tokens, backward() of another "
                "loss (add it to the criterion's, per sample), or a hook on a parameter. Leave "
                "them out, or use grad_sample_mode='hooks', which ignores p.grad; call zero_grad() "
                "before the next batch"
            )

    def _divide(self, divisor: float | Tensor) -> None:
        super()._divide(self._watch.guarded(divisor))

    def _named(self, parameters: list[nn.Parameter]) -> str:
        """Names of parameters in the model, the first few."""
        known = self._names
        names = [known.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in parameters[:5]]
        more = len(parameters) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def _check_clipped(self, fresh: Sequence[Tensor | None]) -> None:
        unclipped = self.expects_criterion and self.clipped_batches == 0
        if unclipped or (not self._waits and all(grad is None for grad in fresh)):
            raise RuntimeError(
                "step() found no clipped gradient: use the criterion that make_private returned "
                "and call backward() on its loss. The backward() of an ordinary loss clips "
                "nothing, so it leaves no gradient in ghost modes; nor does one that has failed. A "
                "second step() needs another backward()"
            )
        if not self.expects_criterion and self._recorded():
            raise RuntimeError(
                f"{type(self).__name__} takes p.grad for sums that were clipped in the backward "
                "pass, but this model leaves per-sample gradients, and p.grad is not clipped: use "
                "DPOptimizer with GradSampleModule"
            )
        if (self._loss_scale or 1.0) != self._scaled.scale:
            self._refuse_scale(f"step() divides by {self._scaled.scale}, but gradients have")

    def _check_known(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that joined ``original_optimizer`` later: nothing clips them."""
        known = {id(parameter) for parameter in self._known}
        new = [p for p in parameters if id(p) not in known and p.grad is not None]
        if new:
            raise RuntimeError(
                f"{len(new)} parameters (shapes {[tuple(p.shape) for p in new[:4]]}) were added to "
                "the optimizer after make_private, so their gradients are "
                "not clipped. Call make_private again, with a new optimizer"
            )

    def _refuse_scale(self, what: str) -> None:
        """A gradient that is not divided by its own scale has another sensitivity than C."""
        raise RuntimeError(
            f"{what} loss scale {self._loss_scale}: use scaler.scale(loss).backward(), then "
            "scaler.step(optimizer) instead of optimizer.step(), then scaler.update()"
        )

    def clip_and_accumulate(self) -> None:
        """Clipping happened in the backward pass; accumulate its result."""
        self._note_clipping_norm()
        self.accumulate()

    def _get_flat_grad_sample(self, p: Tensor) -> Tensor:
        raise ValueError("ghost clipping forms no per-sample gradients")

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear ``p.grad`` and, after a real step, ``p.summed_grad``.

        Args:
            set_to_none: Set ``p.grad`` to ``None`` rather than to zero.
        """
        if self.clipped_batches:  # dropped; the next batch may be of another draw
            self.give_up_step()
        self.clipped_batches, self._clipped_samples, self._loss_scale = 0, 0, None
        if self._waits:
            self._forget_waiting(warn=True)
        self._watch.forget()
        super().zero_grad(set_to_none)

    def reset_accumulation(self) -> None:
        """Forget queued skip signals and partial sums of an unfinished logical batch."""
        self.clipped_batches, self._clipped_samples, self._loss_scale = 0, 0, None
        self._watch.forget()
        self._forget_waiting()
        super().reset_accumulation()
        self.original_optimizer.zero_grad()
