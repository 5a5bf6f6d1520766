"""Ghost clipping under FSDP2, with norms computed at once or after the backward pass."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.layout import gather_rows, sum_gradients
from opacus.core.one_pass import GradientSink
from opacus.core.reduction import ShardedSink
from opacus.core.recorder import Layer
from opacus.core.rules.tensor_parallel import TensorParallelRule
from opacus.core.sharded import is_dtensor
from opacus.core.torch_internals import reduce_dtypes, tensor_parallel_names
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
)
from opacus.grad_sample.gsm_base import AbstractGradSampleModule


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    """Ghost clipping for a model sharded by FSDP2 (``fully_shard``).

    Each rank holds different samples, so the norm of a sample is complete on its rank
    and is never added to norms of other ranks. The norm pass forms no parameter
    gradient, hence communicates none; the second pass gives FSDP2 the clipped local
    sum, which it reduce-scatters. Every rank runs the same collectives, also with an
    empty local batch.

    The backward hook (:meth:`capture_backprops_hook`) computes the layer's norm, or,
    with deferred norms, appends activations and backprops to ``_deferred_norm_cache``;
    :meth:`compute_all_norms_parallel` runs after the backward pass.

    Args:
        m: The sharded module.
        batch_first: Whether activations have the batch in dimension 0 (else in 1).
        loss_reduction: ``"mean"`` or ``"sum"``.
        strict: Refuse modules that cannot be private.
        force_functorch: Use the generic rule for every layer.
        max_grad_norm: Clipping norm C.
        use_ghost_clipping: ``False`` forms per-sample gradients to take their norms.
        deferred_norm: Overrides the environment variable ``OPACUS_USE_DEFERRED_NORM``.
        book_keeping: Keep what the clipped sum needs, so that there is no second backward
            pass; the sum is then reduce-scattered here rather than by FSDP2.

    Raises:
        ValueError: There is no process group, a trainable parameter is not sharded, or
            the variable is neither 0 nor 1.
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
        book_keeping: bool = False,
    ) -> None:
        _check_sharded(m)
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
            max_grad_norm=max_grad_norm,
            use_ghost_clipping=use_ghost_clipping,
            deferred_norm=deferred_norm,
            book_keeping=book_keeping,
        )
        sum_gradients(m)

    def _layers(self, force_functorch: bool) -> list[Layer]:
        layers = super()._layers(force_functorch)
        # Of a model that is also split by tensor parallelism, any layer may see DTensors.
        if tensor_parallel_names(self._module):
            for layer in layers:
                layer.rule = TensorParallelRule(layer.rule, layer.module)
        return layers

    def _make_sink(self) -> GradientSink:
        parameters = dict(self._module.named_parameters())
        return ShardedSink(parameters, reduce_dtypes(self._module))

    def gather_norm_samples(self) -> Tensor:
        """All-gathered norms of the global batch, in rank order (a collective call).

        Ranks may hold different numbers of samples, none included.
        """
        return gather_rows(self.per_sample_gradient_norms)


class GradSampleModuleFastGradientClippingFSDP(
    GradSampleHooksFastGradientClippingFSDP, AbstractGradSampleModule
):
    """Wrapper module with :class:`GradSampleHooksFastGradientClippingFSDP`; same arguments."""

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
        book_keeping: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        GradSampleHooksFastGradientClippingFSDP.__init__(
            self,
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
            max_grad_norm=max_grad_norm,
            use_ghost_clipping=use_ghost_clipping,
            deferred_norm=deferred_norm,
            book_keeping=book_keeping,
        )
        self.grad_accumulation_hook = None


def _check_sharded(m: nn.Module) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "FSDP modes need a process group: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    plain = [n for n, p in m.named_parameters() if p.requires_grad and not is_dtensor(p)]
    if plain:
        raise ValueError(
            f"parameters {plain[:10]} are not sharded by FSDP2: shard the whole model first, "
            "with opacus.utils.fsdp_utils.FSDP2Wrapper(model) or fully_shard(model)"
        )
