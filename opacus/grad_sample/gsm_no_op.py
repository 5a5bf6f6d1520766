"""No hooks: the user sets ``grad_sample``, for instance with ``torch.func``."""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule


class GradSampleHooksNoOp(AbstractGradSampleHooks):
    """Leaves the module alone; per-sample gradients come from the user.

    Args:
        m: The module.
        batch_first: Must be ``True``.
        loss_reduction: ``"mean"`` or ``"sum"``.

    Raises:
        NotImplementedError: ``batch_first`` is ``False``.
    """

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"
    ) -> None:
        if not batch_first:
            raise NotImplementedError("grad_sample_mode 'no_op' needs batch_first=True")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    def remove_hooks(self) -> None:
        """There are none."""


class GradSampleModuleNoOp(GradSampleHooksNoOp, AbstractGradSampleModule):
    """Wrapper module with :class:`GradSampleHooksNoOp`; same arguments."""

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"
    ) -> None:
        nn.Module.__init__(self)
        GradSampleHooksNoOp.__init__(
            self, m, batch_first=batch_first, loss_reduction=loss_reduction
        )
        self.grad_accumulation_hook = None

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        return super().forward(x, *args, **kwargs)
