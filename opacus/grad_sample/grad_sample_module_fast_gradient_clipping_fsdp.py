"""Ghost clipping under FSDP2, with norms computed at once or after the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.isolation.check import Isolation
from opacus.core.platform.fsdp_passes import reduced_as_a_whole
from opacus.core.platform.profiling import FINAL_COMPUTE, PARALLEL_NORMS, part, timed
from opacus.core.platform.sharded import is_dtensor
from opacus.core.platform.torch_internals import (
    gather_in_backward,
    gathered_by,
    managed_names,
    reduce_dtypes,
    reduced_at_once,
    tensor_parallel_names,
)
from opacus.core.privacy.clipping import Factors
from opacus.core.ranks.data_check import DataCheck
from opacus.core.ranks.data_layout import check_data_layout
from opacus.core.ranks.gather_order import GatherOrder
from opacus.core.ranks.lone_parts import LoneSampleOfParts
from opacus.core.ranks.mesh import ranks_of
from opacus.core.ranks.parallelism import sum_gradients
from opacus.core.ranks.recovery import Recovery
from opacus.core.ranks.reduction import ShardedSink
from opacus.core.ranks.replicated import LayerShares
from opacus.core.ranks.same_norms import check_same_norms
from opacus.core.ranks.shards import can_reduce
from opacus.core.record.carriers import Carries
from opacus.core.record.layers import Layer
from opacus.core.record.lone import LoneSample
from opacus.core.record.record import Record
from opacus.core.rules.tensor_parallel import TensorParallelRule
from opacus.core.sums.one_pass import OnePass
from opacus.core.sums.strategy import Ghost, Phase
from opacus.core.sums.two_pass import TwoPass
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
)
from opacus.grad_sample.gsm_base import AbstractGradSampleModule


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    """Ghost clipping for a model sharded by FSDP2 (``fully_shard``).

    Sharded data (training): each rank holds different samples, so the norm of a sample is
    complete on its rank and is never added to norms of other ranks. Replicated data
    (comparing with one process): all ranks hold the same samples; each measures and sums
    its share of the layers, and norms are summed over ranks.

    The norm pass forms no parameter gradient, hence communicates none; the second pass
    gives FSDP2 the clipped local sum, which it reduce-scatters. Every rank runs the same
    collectives, also with an empty local batch, or one that leaves out a branch of a unit.

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
        kernels: ``"flash"`` or ``"reference"``, see
            :class:`GradSampleHooksFastGradientClipping`.
        data_layout: ``"sharded"`` or ``"replicated"``; ``"auto"`` means sharded here, where
            there is no loader to tell. A batch that contradicts it is an error on all ranks.

    Raises:
        ValueError: There is no process group, a trainable parameter is not sharded,
            ``data_layout`` is none of these, or the variable is neither 0 nor 1.
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
        kernels: str = "reference",
        data_layout: str = "auto",
    ) -> None:
        check_data_layout(data_layout)
        check_sharded(m, book_keeping)
        self.data_layout = "replicated" if data_layout == "replicated" else "sharded"
        self._ranks, self._split = ranks_of(m), tensor_parallel_names(m)
        self.copies_of_samples = self._ranks.copies
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
            kernels=kernels,
        )
        sum_gradients(m)

    def _start_watching(self) -> None:
        """Watches what ranks are fed."""
        layers, replicated = self._recorder.layers, self.data_layout == "replicated"
        self._shares = self._deal(layers) if replicated and self._ranks.count > 1 else None
        self._data_check = DataCheck(replicated, self._ranks)
        handle = self._module.register_forward_pre_hook(self._check_data, with_kwargs=True)
        self._recorder.handles.append(handle)
        self._gather_order = GatherOrder(self._module)
        self._recovery = Recovery(self._module, self._reductions)
        self._recorder.handles += [*self._gather_order.handles, self._recovery.handle]

    def _make_isolation(self, **how: Any) -> Isolation:
        return super()._make_isolation(ranks=self._ranks, **how)

    def _deal(self, layers: list[Layer]) -> LayerShares:
        trainable = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        wide = any(p.dtype == torch.float64 for p in trainable.values())
        dtype = torch.float64 if wide else torch.float32
        return LayerShares(layers, list(trainable), self._ranks, dtype)

    def _check_data(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        with self._recorder.whose.aside():
            self._data_check.before(self._recorder, module, args, kwargs)

    def _lone_sample(self, strategy: Ghost) -> LoneSample | None:
        """See there; where FSDP2 itself reduces the sum, it takes it from the layers' backward."""
        shared = self.data_layout == "replicated" or self._split
        if shared or not isinstance(strategy, OnePass):
            return None
        return LoneSampleOfParts(
            self._module, self._recorder, strategy.receive_lone, strategy.limits
        )

    def _carried(self, strategy: Ghost) -> Carries | None:
        """See there; replicated data are shared out by layers."""
        return None if self.data_layout == "replicated" else super()._carried(strategy)

    def _carrying_parts(self) -> dict[nn.Module, set[str]]:
        return gathered_by(self._module)

    def _layers(self, force_functorch: bool) -> list[Layer]:
        layers = super()._layers(force_functorch)
        # Of a model that is also split by tensor parallelism, any layer may see DTensors.
        if self._split:
            for layer in layers:
                layer.rule = TensorParallelRule(layer.rule, layer.module)
        return layers

    # --- one step ---

    def _sink(self) -> Callable[[Record], None]:
        return self._by_hook if self._watched() else self._receive

    def _receive(self, record: Record) -> None:
        phase, layer = self._strategy.phase, record.layer
        if phase is Phase.SUM and not self.book_keeping:
            self._gather(layer)
        if phase is Phase.IDLE or self._shares is None or self._shares.has(layer):
            super()._receive(record)

    def _gather(self, layer: Layer) -> None:
        """Gather a layer whose gradient bypassed FSDP2: its output was computed again for it."""
        name, owner = next(iter(layer.owners.items()))
        parameter = layer.parameter(name)
        # What is split by tensor parallelism is a DTensor when gathered, too, on its axes alone.
        axes = len(self._ranks.tensor) if owner in self._split else 0
        if not is_dtensor(parameter) or parameter.device_mesh.ndim == axes:
            return
        for unit, names in gathered_by(self._module).items():
            if owner in names:
                gather_in_backward(unit)
                return

    def norm_pass(
        self, losses: Tensor, retain_graph: bool = False, loss_scale: float | None = None
    ) -> None:
        """See :meth:`GradSampleHooksFastGradientClipping.norm_pass`."""
        with self._recovering("norms"):
            super().norm_pass(losses, retain_graph, loss_scale)

    @contextmanager
    def _recovering(self, what: str) -> Iterator[None]:
        """Leaves model and hooks as before the step if a pass fails."""
        try:
            with self._recovery.watch(what):
                yield
        except BaseException:
            self._recorder.passes.forget()
            self._recovery.put_back()
            raise

    def _reductions(self) -> tuple[int, int]:
        """How often gradients have been reduced, and ranks asked, past FSDP2."""
        sink = getattr(self._strategy, "sink", None)
        return getattr(sink, "reductions", 0), getattr(sink, "questions", 0)

    @timed(PARALLEL_NORMS)
    def compute_all_norms_parallel(self) -> Tensor:
        """Compute the norms that wait, and publish all of them; ``[B]``, this rank's samples.

        Runs after the first backward pass has returned; the cache is empty afterwards.
        Sharded data: no collective, the norm of a sample is complete on the rank that holds
        it. Replicated data: an all-reduce (for each axis of the mesh) adds the layers' norms.

        Raises:
            RuntimeError: There was no norm pass; or, on all ranks, ranks that hold the same samples
                by tensor parallelism have other norms.
        """
        norms = super().compute_all_norms_parallel()
        if self._ranks.tensor:
            parameters = dict(self._module.named_parameters())
            check_same_norms(parameters, self._norms.by_name, len(norms), self._ranks.tensor)
        if self._shares is None:
            return norms
        with torch.no_grad():
            norm_sq = self._shares.whole(self._norms.by_name, len(norms), norms.device)
            with part(FINAL_COMPUTE):
                return self._norms.take(norm_sq, len(norms), norms.device)

    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """See :meth:`GradSampleHooksFastGradientClipping.sum_pass`."""
        with self._recovering("sum"):
            if not self._strategy.leaves_gradients():
                super().sum_pass(losses, clipped, retain_graph)
                return
            with reduced_at_once(self._module), reduced_as_a_whole(self._module):
                super().sum_pass(losses, clipped, retain_graph)

    def _make_strategy(self) -> Ghost:
        strategy = super()._make_strategy()
        trained = [p for p in self._module.parameters() if p.requires_grad]
        simple = all(can_reduce(getattr(p, "placements", ())) for p in trained)
        if simple and isinstance(strategy, TwoPass) and not self._split:
            strategy.let_wait(self._make_sink())
        return strategy

    def _make_sink(self) -> ShardedSink:
        parameters = dict(self._module.named_parameters())
        return ShardedSink(parameters, reduce_dtypes(self._module))

    def gather_norm_samples(self, order: str = "rank", indices: Any = None) -> Tensor:
        """Norms of the global batch (with sharded data a collective call).

        Ranks may hold different numbers of samples, none included. With replicated data the
        global batch is that of each rank.

        Args:
            order: ``"rank"``: the samples of rank 0, then those of rank 1, ... ``"dataset"``:
                by increasing index in the data set.
            indices: ``[B_r]`` integers, with ``"dataset"``: which samples of the data set this
                rank's batch has, as its sampler drew them. Let the data set return the index.

        Raises:
            ValueError: ``order`` is neither, or ``indices`` do not fit it.
        """
        norms = self.per_sample_gradient_norms
        if order not in ("rank", "dataset"):
            raise ValueError(f"order must be 'rank' or 'dataset', got {order!r}")
        if (indices is None) != (order == "rank"):
            raise ValueError(
                "order='dataset' needs indices=, this rank's indices in the data set; "
                "order='rank' takes none"
            )
        places = None if indices is None else torch.as_tensor(indices, device=norms.device).long()
        if places is not None and places.shape != norms.shape:
            raise ValueError(
                f"indices must be the {len(norms)} samples of this rank's batch, got shape "
                f"{tuple(places.shape)}"
            )
        if self.data_layout == "sharded":
            norms = self._ranks.gather_rows(norms)
            places = None if places is None else self._ranks.gather_rows(places)
        return norms if places is None else norms[places.argsort(stable=True)]


class GradSampleModuleFastGradientClippingFSDP(
    GradSampleHooksFastGradientClippingFSDP, AbstractGradSampleModule
):
    """Wrapper module with :class:`GradSampleHooksFastGradientClippingFSDP`; same arguments."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(*args, **kwargs)
        except RuntimeError as error:
            self._gather_order.explain(error)
            raise


def check_sharded(m: nn.Module, book_keeping: bool = False) -> None:
    """Refuse a model that the FSDP modes cannot train.

    Raises:
        ValueError: There is no process group, a trainable parameter is not sharded, or the
            single-backward modes cannot reduce it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "FSDP modes need a process group: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    trainable = {n: p for n, p in m.named_parameters() if p.requires_grad}
    managed = managed_names(m)
    plain = [
        name
        for name, parameter in trainable.items()
        if not is_dtensor(parameter) or (managed is not None and name not in managed)
    ]
    if plain:
        raise ValueError(
            f"parameters {plain[:10]} are not sharded by FSDP2: shard the whole model first, "
            "with opacus.utils.fsdp_utils.FSDP2Wrapper(model) or fully_shard(model), or freeze "
            "them (requires_grad_(False))"
        )
    split = sorted(tensor_parallel_names(m)) if book_keeping else []
    if split:
        raise ValueError(
            f"parameters {split[:10]} are split by tensor parallelism too, which the *_fsdp_bk "
            "modes cannot reduce: use grad_sample_mode='ghost_fsdp'"
        )
