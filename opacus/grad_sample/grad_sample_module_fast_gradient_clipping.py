"""Ghost clipping: per-sample gradient norms without per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opacus.core.kernels.norms.suite import kernels_named
from opacus.core.platform.profiling import (
    CLIP_FACTORS,
    FINAL_COMPUTE,
    LOCAL_COMPUTE,
    PARALLEL_NORMS,
    PROFILE,
    part,
    timed,
)
from opacus.core.platform.switches import switched_on
from opacus.core.privacy.clipping import Factors, clip_each, clip_flat
from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.carried import Carried
from opacus.core.record.carriers import Carries
from opacus.core.record.layers import Layer
from opacus.core.record.lone import LoneSample, lone_sample_from_environment
from opacus.core.record.record import Record
from opacus.core.sums.one_pass import OnePass
from opacus.core.sums.strategy import Ghost
from opacus.core.sums.summed import Summed
from opacus.core.sums.terms import LocalSink, WaitingSink
from opacus.core.sums.two_pass import TwoPass
from opacus.core.sums.unreduced import Unreduced
from opacus.grad_sample._ghost import GhostNorms
from opacus.grad_sample._norms import Norms, OrdinaryNorms
from opacus.grad_sample._samplers import FormedRule, Sampler, SamplerRule
from opacus.grad_sample.gsm_base import AbstractGradSampleModule

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


class GradSampleHooksFastGradientClipping(GhostNorms):
    """Hooks for ghost clipping (arXiv:2009.03106, arXiv:2110.05679).

    A first backward pass gives the norms, the clip rule gives the factors, a second
    pass forms the clipped sum; the criterion of
    :class:`~opacus.utils.fast_gradient_clipping_utils.DPLossFastGradientClipping` runs
    all three. An ordinary ``backward()`` leaves no parameter gradient behind.

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
    # Number of ranks that hold each sample, among those whose samples are counted together.
    copies_of_samples = 1
    _sees_loss: ClassVar[bool] = True

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
        self._norms = Norms(m)
        self._summed = Summed()
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )
        self.trainable_parameters = [p for p in m.parameters() if p.requires_grad]
        self._privacy = PrivacyParams(noise_multiplier=0.0, max_grad_norm=max_grad_norm)
        self._loss_scale: float | None = None

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

        Raises:
            RuntimeError: Hooks are disabled.
        """
        if not self.hooks_enabled:
            raise RuntimeError(
                "hooks are disabled, so nothing can be clipped: call enable_hooks() first"
            )
        self._ordinary.forget()
        if self.isolation.pending:
            self.isolation.begin_backward()
        self._loss_scale = loss_scale
        try:
            self._strategy.norm_pass(losses, retain_graph)
            self.compute_all_norms_parallel()
        except BaseException:
            self._strategy.drop()
            raise

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
            with part(FINAL_COMPUTE):
                return self._norms.take(norm_sq, ledger.batch)

    @timed(CLIP_FACTORS)
    def clip(self) -> Factors:
        """Clipping factors of the latest norm pass: flat, or by parameter name."""
        limits = self._privacy.max_grad_norms
        if limits is None:
            norms, privacy = self._norms.whole, self._privacy
            assert norms is not None
            if privacy.gradient_scales is not None:
                norms = self._norms.scaled(privacy.gradient_scales())
            return clip_flat(norms, privacy.sensitivity, privacy.clip_rule)
        by_name = dict(zip(self._norms.order, limits, strict=True))
        of_layers = {name: norm_sq.sqrt() for name, norm_sq in self._norms.by_name.items()}
        return clip_each(of_layers, by_name)

    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """Add the clipped sum to the parameters' ``grad``, by a second backward pass.

        In the ``_bk`` modes it is formed from what the first one kept.

        Args:
            losses: ``[B]`` per-sample losses, those of :meth:`norm_pass`.
            clipped: What :meth:`clip` returned.
            retain_graph: Keep the graph for another backward pass.

        An error in it leaves no gradient: that of earlier batches of the step is dropped too.
        """
        try:
            self._strategy.sum_pass(losses, clipped, retain_graph=retain_graph)
        except BaseException:
            self._strategy.abandon()
            raise
        self._summed.finish()

    @property
    def doubt(self) -> Tensor | None:
        """See :class:`opacus.core.step.private_step.Model`."""
        return self._strategy.doubt

    @property
    def unreduced(self) -> Unreduced | None:
        """See :class:`opacus.core.step.private_step.Model`."""
        return self._strategy.unreduced

    def start_sum(self) -> None:
        """The parameters' gradients are about to be formed anew: no sample is in them yet."""
        self._summed.begin()

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
        recorder, deferred = self._recorder, self._use_deferred_norm
        parameters = list(self._module.named_parameters())
        mean = self.loss_reduction == "mean"
        self._ordinary = ordinary = OrdinaryNorms(self._norms, recorder, self._summed, mean=mean)
        how: dict[str, Any] = {
            "deferred": deferred,
            "summed": self._summed,
            "ordinary": ordinary,
        }
        strategy: Ghost = (
            OnePass(recorder, parameters, sink=self._make_sink(), **how)
            if self.book_keeping
            else TwoPass(recorder, parameters, **how)
        )
        strategy.limit_memory(self._module)
        own_rules = any(isinstance(layer.rule, SamplerRule) for layer in recorder.layers)
        if not (own_rules or self._watched()):
            if lone_sample_from_environment():
                recorder.lone = self._lone_sample(strategy)
            recorder.carried = self._carried(strategy)
        return strategy

    def _carried(self, strategy: Ghost) -> Carries | None:
        """What lets layers do without records; ``None`` where each keeps its record."""
        if strategy.deferred or not isinstance(strategy, OnePass):
            return None
        parts = self._carrying_parts()
        return Carried(parts, self._recorder, strategy.receive_formed, strategy.limits)

    def _carrying_parts(self) -> Mapping[nn.Module, AbstractSet[str]]:
        """The modules through one node of which gradients come, and the parameters of each."""
        return {self._module: {name for name, _ in self._module.named_parameters()}}

    def _lone_sample(self, strategy: Ghost) -> LoneSample | None:
        """What runs batches of one sample without taps; ``None`` where every layer must be seen."""
        recorder = self._recorder
        if self._guards.sharded():
            return None
        return LoneSample(recorder.layers, strategy.receive_lone, recorder.layer_handles)

    def _receive(self, record: Record) -> None:
        if self.hooks_enabled:
            self._strategy.receive(record)

    def _sink(self) -> Callable[[Record], None]:
        return self._by_hook if self._watched() else self._strategy.receive

    def _make_sink(self) -> LocalSink | WaitingSink:
        """Where the clipped sums of a single backward pass go."""
        return LocalSink(dict(self._module.named_parameters()))


class GradSampleModuleFastGradientClipping(
    GradSampleHooksFastGradientClipping, AbstractGradSampleModule
):
    """Wrapper module with :class:`GradSampleHooksFastGradientClipping`; same arguments."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(*args, **kwargs)
        finally:
            self._recorder.end_lone()  # also after a KeyboardInterrupt
