"""The mode ``"ew"``: what torch's expanded weights compute, by the rules of this package."""

from __future__ import annotations

from torch import nn

from opacus.grad_sample.grad_sample_module import GradSampleModule


class GradSampleModuleExpandedWeights(GradSampleModule):
    """The wrapper of ``hooks``, by the name of ``ew``: same per-sample gradients, same checks.

    torch's own ``call_for_per_sample_grads`` is not used: it sees a parameter being expanded, but
    neither whose rows a layer gets nor whether samples depend on each other, and nothing can look
    into it. In batches of any kind that it takes rightly, the numbers here are the same.

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
            raise NotImplementedError("grad_sample_mode 'ew' needs batch_first=True")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
