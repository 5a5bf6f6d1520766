"""Ghost clipping: per-sample gradient norms without per-sample gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opacus.core.kernels.norms.suite import kernels_named
from opacus.core.norms.ledger import NormLedger, total_norms
from opacus.core.platform.profiling import (
    CLIP_FACTORS,
    FINAL_COMPUTE,
    LOCAL_COMPUTE,
    PARALLEL_NORMS,
    PROFILE,
    part,
    timed,
)
from opacus.core.platform.sharded import compute_device
from opacus.core.platform.switches import switched_on
from opacus.core.privacy.clipping import Clipped, clip_each, clip_flat
from opacus.core.privacy.params import PrivacyParams
from opacus.core.record.layers import Layer
from opacus.core.record.record import ForwardPass, Generation, Record
from opacus.core.record.tap import trains
from opacus.core.record.whole import LoneSample, lone_sample_from_environment
from opacus.core.rules.base import scale_rows
from opacus.core.sums.one_pass import GradientSink, LocalSink, OnePass
from opacus.core.sums.strategy import Ghost, Phase, TwoPass
from opacus.grad_sample._samplers import FormedRule, Sampler, SamplerRule, total_norm
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.gsm_base import AbstractGradSampleModule

logger = logging.getLogger(__name__)

DEFERRED_VARIABLE = "OPACUS_USE_DEFERRED_NORM"


def deferred_from_environment() -> bool:
    """Whether ``OPACUS_USE_DEFERRED_NORM`` asks for deferred norms (default: no).

    Raises:
        ValueError: The variable is neither ``0`` nor ``1``.
    """
    return switched_on(DEFERRED_VARIABLE)


def create_norm_sample(*, param: Tensor, grad_sample: Tensor, max_batch_len: int) -> None:
    """Set ``param._norm_sample`` ``[B]`` to the norms of ``grad_sample`` ``[n, *shape]``."""
    if not param.requires_grad:
        return
    norms = torch.zeros(max_batch_len, device=grad_sample.device, dtype=grad_sample.dtype)
    norms[: grad_sample.shape[0]] = grad_sample.reshape(len(grad_sample), -1).norm(2, dim=-1)
    param._norm_sample = norms  # type: ignore[attr-defined]


class GradSampleHooksFastGradientClipping(GradSampleHooks):
    """Hooks for ghost clipping (arXiv:2009.03106, arXiv:2110.05679).

    A first backward pass gives the norms, the clip rule gives the factors, a second
    pass forms the clipped sum; the criterion of
    :class:`~opacus.utils.fast_gradient_clipping_utils.DPLossFastGradientClipping` runs
    all three. Ordinary ``backward()`` leaves no parameter gradient behind.

    Deferred norms: the backward hook only keeps the record of a layer, without
    touching a parameter or a collective; :meth:`compute_all_norms_parallel` computes
    them after the backward pass, small layers of equal shape in one batched call.
    Immediate: each norm is computed in its hook. Both give the same numbers.

    Args:
        m: The module.
        batch_first: Whether activations have the batch in dimension 0 (else in 1).
        loss_reduction: ``"mean"`` or ``"sum"``.
        strict: Refuse modules that cannot be private.
        force_functorch: Use the generic rule for every layer.
        max_grad_norm: Clipping norm C.
        use_ghost_clipping: ``False`` forms per-sample gradients to take their norms
            (fast gradient clipping) instead of using the rules' shortcuts.
        deferred_norm: Overrides the environment variable ``OPACUS_USE_DEFERRED_NORM``.
        book_keeping: Keep what the clipped sum needs, so that there is no second backward
            pass: faster, with more memory (the ``_bk`` modes).
        kernels: ``"flash"``: norms by Triton kernels where they are faster on this card (the
            ``flash`` modes); ``"reference"``: plain PyTorch.

    Guarantee: after the criterion's ``backward()``, each parameter's ``grad`` has
    grown by the sum over samples of ``c_i g_i`` with ``c_i ||g_i|| <= C``.
    """

    NORM_SAMPLERS: ClassVar[dict[type[nn.Module], Sampler]] = {}
    _sees_loss: ClassVar[bool] = True
    _takes_lone_samples: ClassVar[bool] = True

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
    ) -> None:
        self.use_ghost_clipping = use_ghost_clipping
        self.book_keeping = book_keeping
        self.kernels = kernels_named(kernels)
        deferred = deferred_from_environment() if deferred_norm is None else bool(deferred_norm)
        self._use_deferred_norm = deferred
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )
        self.trainable_parameters = [p for p in m.parameters() if p.requires_grad]
        self._privacy = PrivacyParams(noise_multiplier=0.0, max_grad_norm=max_grad_norm)
        self._per_sample_gradient_norms: Tensor | None = None
        self._norm_sq: dict[str, Tensor] = {}
        self._loss_scale: float | None = None
        self._warned_of_ordinary = False
        self._observed: NormLedger | None = None
        self._observed_generation: Generation | None = None
        self._observed_passes: set[ForwardPass] = set()  # on one sample, among them
        self.order_parameters(self.trainable_parameters)

    @property
    def max_grad_norm(self) -> Any:
        """Clipping norm C: the one that the optimizer's noise is scaled with."""
        return self._privacy.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        self._privacy.max_grad_norm = value

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """``[B]`` norms of the per-sample gradients of the latest norm pass, before clipping."""
        if self._per_sample_gradient_norms is None:
            raise AttributeError(
                "per_sample_gradient_norms is not set: run the criterion's loss.backward() first"
            )
        return self._per_sample_gradient_norms

    @per_sample_gradient_norms.setter
    def per_sample_gradient_norms(self, value: Tensor) -> None:
        self._per_sample_gradient_norms = value

    # --- one step ---

    def norm_pass(
        self, losses: Tensor, retain_graph: bool = False, loss_scale: float | None = None
    ) -> None:
        """First backward pass of the per-sample losses ``[B]``, then all norms.

        Args:
            losses: The losses with their graph.
            retain_graph: Keep the graph where no second pass needs it.
            loss_scale: Factor that ``GradScaler`` put on the losses; norms are those of
                the gradients without it.
        """
        if not self.hooks_enabled:
            raise RuntimeError(
                "hooks are disabled, so nothing can be clipped: call enable_hooks() first"
            )
        self._observed = self._observed_generation = None
        self._loss_scale = loss_scale
        try:
            self._strategy.norm_pass(losses, retain_graph)
            self.compute_all_norms_parallel()
        except BaseException:
            self._strategy.ledger = None  # what it holds may be much
            raise

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Record,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Use the record of one layer's backward, as the phase of the step asks for.

        In the norm pass the layer's norm is computed, or its record is kept if norms are
        deferred. See :meth:`GradSampleHooks.capture_backprops_hook` for the arguments.
        """
        if self.hooks_enabled and self._strategy.phase is Phase.IDLE:
            self._observe(_forward_input)
        else:
            super().capture_backprops_hook(
                module, _forward_input, forward_output, loss_reduction, batch_first
            )

    def _observe(self, record: Record) -> None:
        """An ordinary ``backward()``: its norms can be looked at, nothing is clipped."""
        self._note_ordinary(record.forward_pass, list(record.layer.owners.values()))
        ledger = self._observed
        if (
            ledger is None
            or self._observed_generation is not record.generation
            or (not record.reused and ledger.has_measured(record.spec.name))  # retain_graph=True
        ):
            ledger = self._observed = NormLedger(record.rows)
            self._observed_generation = record.generation
            self._per_sample_gradient_norms = None
            self._publish({})
        if self.loss_reduction == "mean":
            backprops = record.backprops
            first = backprops[0] if isinstance(backprops, tuple) else backprops
            rows = torch.full(
                (len(first),), float(record.mean_of), dtype=torch.float32, device=first.device
            )
            record = replace(record, backprops=scale_rows(backprops, rows))
        with self._recorder.paused():
            ledger.add(record)
        known = ledger.known(record.layer.owners.values())
        for local, owner in record.layer.owners.items():
            if owner in known:
                parameter: Any = record.layer.parameter(local)
                parameter._norm_sample = known[owner].sqrt()

    def _note_ordinary(self, forward_pass: ForwardPass | None, parameters: list[str]) -> None:
        if forward_pass is None or not parameters or not trains():
            return  # autograd.grad asks for other gradients than the parameters'
        self._strategy.note_ordinary(forward_pass, parameters)
        if not self._warned_of_ordinary:
            self._warned_of_ordinary = True
            logger.warning(
                "backward() of an ordinary loss ran through the private model in train mode. In "
                "ghost modes it leaves no gradient in the model's parameters: losses come from "
                "the criterion of make_private. For other losses (public data, inputs, another "
                "network) call eval() or disable_hooks() before the forward pass, or ignore this."
            )

    @timed(PARALLEL_NORMS)
    def compute_all_norms_parallel(self) -> Tensor:
        """Compute the norms that wait, and publish all of them; ``[B]``, this rank's samples.

        Runs after the first backward pass has returned; the cache is empty afterwards.
        Does no collective: the norm of a sample is complete on the rank that holds it.

        Raises:
            RuntimeError: There was no norm pass.
        """
        ledger = self._strategy.ledger
        if ledger is None:
            raise RuntimeError(
                "compute_all_norms_parallel() needs the records of a norm pass; it is called by "
                "the backward() of the loss that the criterion from make_private returns"
            )
        with self._recorder.paused(), torch.no_grad():
            if PROFILE.on and self._use_deferred_norm:
                PROFILE.deferred_norms({record.spec.name for record in ledger.waiting})
            with part(LOCAL_COMPUTE):
                norm_sq = ledger.finish()
            if self._loss_scale is not None:
                norm_sq = {n: v / self._loss_scale**2 for n, v in norm_sq.items()}
            device = compute_device(next(self._module.parameters()))
            with part(FINAL_COMPUTE):
                self._per_sample_gradient_norms = total_norms(norm_sq, ledger.batch, device)
                self._norm_sq = norm_sq
                self._publish(norm_sq)
        return self.per_sample_gradient_norms

    @property
    def deferred_norm_budget(self) -> int | None:
        """Bytes that deferred records may hold; beyond it the oldest are computed early.

        ``None`` (the default) means a twentieth of what a CUDA device holds when the backward
        pass starts, and no limit on the CPU. The numbers are the same whatever the budget.
        """
        return self._strategy.budget_bytes

    @deferred_norm_budget.setter
    def deferred_norm_budget(self, value: int | None) -> None:
        if value is not None and value < 0:
            raise ValueError(f"deferred_norm_budget must be a number of bytes >= 0, got {value}")
        self._strategy.budget_bytes = value

    @property
    def _deferred_norm_cache(self) -> list[Record]:
        """Records of the running norm pass whose norm has not been computed yet."""
        ledger = self._strategy.ledger
        return ledger.waiting if ledger is not None else []

    @timed(CLIP_FACTORS)
    def clip(self) -> Clipped | tuple[dict[str, Tensor], Tensor]:
        """Clipping factors of the latest norm pass: flat, or by parameter name."""
        limits = self._privacy.max_grad_norms
        if limits is None:
            return clip_flat(self.per_sample_gradient_norms, self._privacy.sensitivity)
        by_name = dict(zip(self.parameter_order, limits, strict=True))
        norms = {name: norm_sq.sqrt() for name, norm_sq in self._norm_sq.items()}
        return clip_each(norms, by_name)

    def sum_pass(self, losses: Tensor, clipped: Any, retain_graph: bool = False) -> None:
        """Add the clipped sum to the parameters' ``grad``, by a second backward pass.

        In the ``_bk`` modes it is formed from what the first one kept.

        Args:
            losses: ``[B]`` per-sample losses, those of :meth:`norm_pass`.
            clipped: What :meth:`clip` returned.
            retain_graph: Keep the graph for another backward pass.

        An error in it leaves no gradient: that of earlier batches of the step is dropped too.
        """
        if isinstance(clipped, Clipped):
            clipped = (clipped.factors, clipped.excluded)
        try:
            self._strategy.sum_pass(losses, *clipped, retain_graph=retain_graph)
        except BaseException:
            self._strategy.abandon()
            raise
        self._strategy.finish_sum()

    @property
    def doubt(self) -> Tensor | None:
        """See :class:`opacus.core.step.private_step.Model`."""
        return self._strategy.doubt

    def start_sum(self) -> None:
        """The parameters' gradients are about to be formed anew: no sample is in them yet."""
        self._strategy.start_sum()

    def order_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Say which parameter each of the per-layer clipping norms belongs to."""
        names = {id(p): name for name, p in self._strategy.parameters}
        self.parameter_order = [names[id(p)] for p in parameters]

    def get_norm_sample(self) -> Tensor:
        """``[B]`` norms of the per-sample gradients, from the parameters' ``_norm_sample``."""
        if self._observed is not None:
            with self._recorder.paused(), torch.no_grad():
                self._publish(self._observed.finish())
            self._observed = self._observed_generation = None
        named = [p for p in self.trainable_parameters if hasattr(p, "_norm_sample")]
        if not named:
            return self.per_sample_gradient_norms
        self._per_sample_gradient_norms = total_norm([p._norm_sample for p in named])  # type: ignore[attr-defined]
        return self._per_sample_gradient_norms

    def get_clipping_coef(self) -> Tensor:
        """``[B]`` factors ``min(1, C / (norm + 1e-6))``; 0 where the norm is not finite."""
        return clip_flat(self.get_norm_sample(), self._privacy.sensitivity).factors

    def _publish(self, norm_sq: dict[str, Tensor]) -> None:
        roots = torch._foreach_sqrt(list(norm_sq.values())) if norm_sq else []
        norms = dict(zip(norm_sq, roots, strict=True))
        for name, parameter in self._strategy.parameters:
            if name in norms:
                parameter._norm_sample = norms[name]
            elif hasattr(parameter, "_norm_sample"):
                del parameter._norm_sample  # no stale norm of a layer that was not used

    # --- hooks ---

    def _layers(self, force_functorch: bool) -> list[Layer]:
        layers = super()._layers(force_functorch)
        rules = {id(layer.rule): layer.rule.with_kernels(self.kernels) for layer in layers}
        for layer in layers:
            layer.rule = rules[id(layer.rule)]
            if not self.use_ghost_clipping:
                layer.rule = FormedRule(layer.rule)
        return layers

    def _make_strategy(self) -> Ghost:
        self._recorder.lone = self._make_lone()
        parameters = list(self._module.named_parameters())
        deferred = self._use_deferred_norm
        if self.book_keeping:
            return OnePass(self._recorder, parameters, deferred=deferred, sink=self._make_sink())
        return TwoPass(self._recorder, parameters, deferred=deferred)

    def _make_lone(self) -> LoneSample | None:
        """What runs batches of one sample without taps; ``None`` where every layer must be seen."""
        layers = self._recorder.layers
        watched = type(self).capture_backprops_hook is not _CAPTURE
        own_rules = any(isinstance(layer.rule, SamplerRule) for layer in layers)
        if watched or own_rules or not self._takes_lone_samples or self._is_sharded():
            return None
        if not lone_sample_from_environment():
            return None
        return LoneSample(layers, self._on_whole, self._recorder.layer_handles)

    def _on_whole(self, forward_pass: ForwardPass, grads: dict[str, Tensor]) -> None:
        if not self.hooks_enabled or self._strategy.phase is not Phase.IDLE:
            self._strategy.receive_whole(forward_pass, grads)
            return
        self._note_ordinary(forward_pass, list(grads))
        generation = forward_pass.generation  # of an ordinary backward(); see _observe
        if self._observed_generation is not generation or forward_pass in self._observed_passes:
            self._observed, self._observed_generation = NormLedger(1), generation
            self._observed_passes.clear()
            self._per_sample_gradient_norms = None
        assert self._observed is not None
        self._observed_passes.add(forward_pass)
        self._observed.add_whole(grads)
        self._publish(self._observed.known())

    def _make_sink(self) -> GradientSink:
        """Where the clipped sums of a single backward pass go."""
        return LocalSink(dict(self._module.named_parameters()))

    def explain(self) -> str:
        """The plan of the latest step: what was kept of each layer, and what it costs.

        Before it, which mode ``grad_sample_mode="auto"`` has chosen, and why.

        Raises:
            RuntimeError: The mode keeps nothing: it is none of the ``_bk`` modes.
        """
        planner = self._strategy.planner
        if planner is None:
            return super().explain()
        table = planner.table()
        if not planner.choices and self._recorder.lone is not None and self._recorder.lone.ready:
            table += "\nBatches of one sample: autograd's whole gradient, kept; no layer is tapped."
        return table if self.auto_choice is None else f"{self.auto_choice}\n\n{table}"

    @property
    def held_budget(self) -> int | None:
        """Bytes that may be kept for the clipped sum in the ``_bk`` modes.

        Beyond it the smaller of per-sample gradients and records is kept. ``None`` (the
        default): most of what is free on a CUDA device, and no limit on the CPU.
        """
        return self._strategy.held_budget

    @held_budget.setter
    def held_budget(self, value: int | None) -> None:
        if value is not None and value < 0:
            raise ValueError(f"held_budget must be a number of bytes >= 0, got {value}")
        self._strategy.held_budget = value

    def log_module_gradient_sample_mode(
        self, module: nn.Module, *, force_functorch: bool = False, use_ghost_clipping: bool = True
    ) -> str:
        """How the norms of ``module``'s own parameters are computed."""
        for layer in self._recorder.layers:
            if layer.module is module:
                return type(layer.rule).__name__
        return "no trainable parameters of its own"


_CAPTURE = GradSampleHooksFastGradientClipping.capture_backprops_hook


class GradSampleModuleFastGradientClipping(
    GradSampleHooksFastGradientClipping, AbstractGradSampleModule
):
    """Wrapper module with :class:`GradSampleHooksFastGradientClipping`; same arguments."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(*args, **kwargs)
        finally:
            self._recorder.end_lone()  # also after a KeyboardInterrupt

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
    ) -> None:
        nn.Module.__init__(self)
        GradSampleHooksFastGradientClipping.__init__(
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
            kernels=kernels,
        )
        self.grad_accumulation_hook = None
