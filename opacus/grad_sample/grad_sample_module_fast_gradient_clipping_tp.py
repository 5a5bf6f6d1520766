"""Ghost clipping under tensor parallelism (``parallelize_module``)."""

from __future__ import annotations

from torch import nn

from opacus.core.platform.sharded import is_dtensor
from opacus.core.record.layers import Layer
from opacus.core.rules.tensor_parallel import TensorParallelRule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
)
from opacus.grad_sample.gsm_base import AbstractGradSampleModule


class GradSampleHooksFastGradientClippingTP(GradSampleHooksFastGradientClipping):
    """Ghost clipping for a model whose layers are split over ranks.

    All ranks hold the same samples. The norm of a split layer is summed over the ranks
    that share it, what every rank holds is counted once.

    Args:
        m: The module, after ``parallelize_module``.
        batch_first: Whether activations have the batch in dimension 0 (else in 1).
        loss_reduction: ``"mean"`` or ``"sum"``.
        strict: Refuse modules that cannot be private.
        force_functorch: Use the generic rule for every layer.
        max_grad_norm: Clipping norm C.
        use_ghost_clipping: ``False`` forms per-sample gradients to take their norms.
        deferred_norm: Overrides the environment variable ``OPACUS_USE_DEFERRED_NORM``.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
        deferred_norm: bool | None = None,
    ) -> None:
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
            max_grad_norm=max_grad_norm,
            use_ghost_clipping=use_ghost_clipping,
            deferred_norm=deferred_norm,
        )
        self.set_pattern_param_sample_norm_sum()

    def set_pattern_param_sample_norm_sum(self) -> None:
        """Note on each parameter (``merge_flag``) whether its norm is a sum over ranks."""
        for parameter in self.trainable_parameters:
            split = is_dtensor(parameter) and any(p.is_shard() for p in parameter.placements)
            parameter.merge_flag = split  # type: ignore[attr-defined]

    def _layers(self, force_functorch: bool) -> list[Layer]:
        layers = super()._layers(force_functorch)
        for layer in layers:
            layer.rule = TensorParallelRule(layer.rule, layer.module)
        return layers

    def cleanup(self) -> None:
        """Remove the hooks and every attribute that was put on parameters."""
        super().cleanup()
        for parameter in self._module.parameters():
            if hasattr(parameter, "merge_flag"):
                del parameter.merge_flag


class GradSampleModuleFastGradientClippingTP(
    GradSampleHooksFastGradientClippingTP, AbstractGradSampleModule
):
    """Wrapper module with :class:`GradSampleHooksFastGradientClippingTP`; same arguments."""
