"""Ghost clipping under tensor parallelism (``parallelize_module``)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.platform.sharded import compute_device, is_dtensor
from opacus.core.ranks.data_check import DataCheck
from opacus.core.ranks.mesh import ModelRanks
from opacus.core.ranks.same_norms import check_same_norms
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

    def _start_watching(self) -> None:
        """Watches that ranks are fed the same."""
        handle = self._module.register_forward_pre_hook(self._check_data, with_kwargs=True)
        self._recorder.handles.append(handle)

    def _check_data(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if world := _world():
            device = compute_device(self.trainable_parameters[0])
            ranks = ModelRanks((), (world,), 0, 1, device)
            DataCheck(False, ranks).before(self._recorder, module, args, kwargs)

    def _layers(self, force_functorch: bool) -> list[Layer]:
        layers = super()._layers(force_functorch)
        for layer in layers:
            layer.rule = TensorParallelRule(layer.rule, layer.module)
        return layers

    def compute_all_norms_parallel(self) -> Tensor:
        """Compute the norms that wait, and publish all of them; ``[B]``, equal on all ranks.

        Raises:
            RuntimeError: There was no norm pass; or, on all ranks, their norms differ.
        """
        norms = super().compute_all_norms_parallel()
        if world := _world():
            parameters = dict(self._module.named_parameters())
            check_same_norms(parameters, self._norms.by_name, len(norms), [world])
        return norms

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


def _world() -> dist.ProcessGroup | None:
    """All ranks, which hold the same samples; ``None`` without a process group."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
