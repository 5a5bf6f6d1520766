"""Physical batches of a logical one: which step is real, and what a loss scale has overflowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.platform.sharded import compute_device
from opacus.core.ranks.parallelism import Single
from opacus.core.step.loss_scale import NO_SCALER, ScaledStep, scaled_step


class PhysicalBatches:
    """Takes physical batches, and knows of each whether others of its logical batch follow."""

    # GradScaler then calls step() after an overflow too, and says what it scaled by.
    _step_supports_amp_scaling: ClassVar[bool] = True
    # Set by GradScaler while its step runs.
    found_inf: Tensor | None = None

    params: list[nn.Parameter]
    _parallelism: Single
    _forget_step: Callable[[], None]
    _scaled: ScaledStep = NO_SCALER
    _overflowed = False  # in any physical batch since the last real step
    _is_last_step_skipped = False

    clip_and_accumulate: Callable[[], None]
    begin_batch: Callable[[], None]
    call_step_hooks: Callable[[], None]
    _discard: Callable[[], None]
    _counts: Callable[[], list[Any]]
    _count_step: Callable[[list[Any]], None]

    def _start_batches(self) -> None:
        self._step_skip_queue: list[bool] = []
        self._cleared_since_signal = False

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Say whether the next :meth:`step` only accumulates (``True``) or is a real one."""
        self._step_skip_queue.append(do_skip)
        self._cleared_since_signal = False
        self.begin_batch()

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        if not self._step_skip_queue:
            return False
        return self._step_skip_queue.pop(0) if pop_next else self._step_skip_queue[0]

    def take_batch(self) -> None:
        """Clip and accumulate the batch, unless a gradient overflowed at this loss scale."""
        self._scaled = NO_SCALER if self.found_inf is None else scaled_step(self)
        try:
            if self._scaled.overflow:
                self._discard()
            else:
                self.clip_and_accumulate()
        finally:
            overflow, active = self._scaled.overflow, self._scaled.active
            self._scaled = ScaledStep(active=active)
        self._overflowed |= overflow

    def is_physical(self) -> bool:
        """Whether this was signalled to be a physical batch that others follow."""
        self._is_last_step_skipped = more = self._check_skip_next_step()
        return more

    def overflowed_anywhere(self) -> bool:
        """Whether a batch of this step overflowed, the same answer on every rank."""
        if not self._scaled.active or self._parallelism.world_size == 1:
            return self._overflowed
        flag = torch.tensor([float(self._overflowed)], device=compute_device(self.params[0]))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def skip_overflowed_step(self) -> None:
        """Release nothing and drop the sums; the accountant counts the step."""
        self._count_step(self._counts())
        self._parallelism.skip_noise()
        for parameter in self.params:
            parameter.summed_grad = None  # type: ignore[attr-defined]
        self._overflowed = False
        self._forget_step()
        self.call_step_hooks()
